"""Explanations of failed steps: out of memory and non-finite values."""
