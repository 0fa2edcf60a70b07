"""Megatron's `torch_dist` format, a distributed checkpoint of torch, read and written."""
