"""Stand-in for liger-kernel 0.8.5."""
