"""Layers that families are made of."""
