"""Heads for tasks, in place of a family's own: classification and multiple choice."""
