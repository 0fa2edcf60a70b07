"""Configuration written for other systems: Megatron's flags and DeepSpeed's JSON."""
