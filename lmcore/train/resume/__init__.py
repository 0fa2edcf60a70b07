"""Saving and resuming of a run."""
