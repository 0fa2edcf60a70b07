"""Stands for the compiled part of flash-attn 2."""
