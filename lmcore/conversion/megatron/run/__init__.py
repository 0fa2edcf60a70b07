"""Run that a checkpoint of Megatron records: its arguments, read and written, and its schedule."""
