"""Kernels of other packages, by package, and the rules on them."""
