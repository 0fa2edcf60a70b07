"""Training: the data of a run, one step, the loop around it, and its records."""
