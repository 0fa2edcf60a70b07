"""Fused ops: specs, kernels, and the table that binds one kernel to each op."""
