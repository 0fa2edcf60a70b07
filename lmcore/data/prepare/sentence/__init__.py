"""Sentence splitting for `lmcore data prepare --split-sentences`."""
