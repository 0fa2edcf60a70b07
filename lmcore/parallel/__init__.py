"""Where a model is laid out over a device mesh: tensor, sequence, pipeline and data parallel.

Placement is applied to a finished model, never written in it; see docs/explanation/parallel.md.
"""
