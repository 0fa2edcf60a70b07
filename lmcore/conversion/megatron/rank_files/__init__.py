"""Megatron's `torch` format, a file for each model-parallel rank, read and written."""
