"""TPUs and other PJRT devices for lmcore: a lazy device, through torch_xla.

The entry point is `lmcore_xla.plugin`, which loads neither torch nor torch_xla.
"""
