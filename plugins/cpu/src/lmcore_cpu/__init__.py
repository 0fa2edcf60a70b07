"""The reference accelerator: PyTorch on the host's processors.

It travels the same road as any other plugin: found by its entry point, asked through the hooks,
and never imported by the core.
"""
