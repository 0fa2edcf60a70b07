"""Stand-in for the folder of the compiled part of flash-attn 3."""
