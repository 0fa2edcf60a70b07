"""Weights that do not change any more: cast, packed, quantized."""
