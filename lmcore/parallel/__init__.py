"""Where a model is laid out over a device mesh: tensor, sequence, pipeline and data parallel.

Nothing yet: a run uses one process.  Placement is applied to a finished model, never written in it.
"""
