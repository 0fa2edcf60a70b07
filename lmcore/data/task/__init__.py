"""Labelled texts of a task: their files, the indexed dataset made of them, and its samples."""
