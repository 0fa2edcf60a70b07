"""Functions that Triton compiles, and nothing else; the modules above launch them.

A kernel works on rows of a matrix whose columns lie side by side.  Pointers are named after what
they point to, sizes that a kernel is compiled for are in capitals.  Everything is read into
float32 and written in the type of where it goes.  Offsets of rows have 64 bits.
"""
