"""Megatron's indexed datasets (`.bin` and `.idx`): reading, writing, metadata, statistics."""
