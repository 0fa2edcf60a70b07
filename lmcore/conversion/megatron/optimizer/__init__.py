"""State of Adam in both of Megatron's formats: groups, moments, buffers, loss scale."""
