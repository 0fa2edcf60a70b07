"""Parallel layouts that train the same steps: their cases, their runs, and the comparison."""
