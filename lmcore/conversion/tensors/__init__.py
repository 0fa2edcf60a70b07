"""Tensors of a checkpoint by name: listed, compared with another checkpoint's, and edited."""
