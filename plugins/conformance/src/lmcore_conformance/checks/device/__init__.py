"""Level 1: the device without a model."""
