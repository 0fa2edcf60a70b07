"""Stand-in for the compiled part of flash-attn 3."""  # noqa: N999 - its name there
