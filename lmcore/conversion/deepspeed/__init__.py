"""Checkpoints of DeepSpeed's engine: of Megatron-DeepSpeed, and of models of transformers."""
