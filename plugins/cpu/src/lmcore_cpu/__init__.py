"""The reference accelerator: PyTorch on the host's processors.

It is a plugin like any other: found by its entry point, called through the hooks,
and never imported by the core.
"""
