"""Parameters of Megatron's models: names, parallel layout, tensor-parallel parts, vocabulary."""
