"""Stand-in for what flash-attn-4 is written in."""
