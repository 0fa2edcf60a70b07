"""Heads for tasks, in place of a family's own: classification, multiple choice and regression."""
