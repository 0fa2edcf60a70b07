"""Stand-in for the compiled part of flash-attn 2."""
