"""On-disk cache of sample indices, built by one process while other processes wait."""
