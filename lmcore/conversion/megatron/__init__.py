"""Checkpoints of Megatron-LM and of forks with its files, read and written."""
