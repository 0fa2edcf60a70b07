"""Attention kernels for NVIDIA GPUs, and the table of them."""
