"""Kernels in Triton, of no vendor: a library for the plugins of devices that Triton compiles for.

`lmcore_triton.offers.op_impls` lists them, and loads neither torch nor Triton.  A device's
plugin calls it from its hook `lmcore_op_impls`; this package has no entry point.
"""
