"""Stands for its part for torch."""
