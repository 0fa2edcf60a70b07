"""Calls of kernels as a model makes them: inputs of every op, and comparison with float64."""
