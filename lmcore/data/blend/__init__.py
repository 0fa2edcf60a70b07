"""Blends: data sources of a run, their weights, and the dataset mixed from them."""
