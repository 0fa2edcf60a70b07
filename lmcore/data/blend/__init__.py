"""Blends: the sources of a run, their weights, and one dataset mixed from several."""
