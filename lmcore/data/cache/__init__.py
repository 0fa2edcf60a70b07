"""On-disk cache of sample indices, built by one process while the others wait."""
