"""Level 5: features that are optional for a run."""
