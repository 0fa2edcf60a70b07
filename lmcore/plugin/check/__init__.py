"""Checks of one plugin: its hooks, records, kernels, device and source."""
