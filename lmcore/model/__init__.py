"""Description of models without torch: their shapes, their parameters, and their families."""
