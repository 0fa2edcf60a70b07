"""Stand-in for NVIDIA apex 25.09, built with its CUDA extensions."""
