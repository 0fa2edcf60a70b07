"""Configuration of other systems: Megatron's flags and DeepSpeed's JSON."""
