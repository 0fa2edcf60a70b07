"""Tensor, sequence, context, pipeline and data parallelism of a model over a device mesh.

It is applied to a finished model, never written in one; see docs/explanation/parallel.md.
"""
