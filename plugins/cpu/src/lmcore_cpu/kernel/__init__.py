"""Kernels for the CPU, by op."""
