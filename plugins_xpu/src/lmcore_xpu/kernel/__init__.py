"""Kernels for Intel GPUs."""
