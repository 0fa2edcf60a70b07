"""NVIDIA GPUs for lmcore: found through the driver, used through torch's own device module."""
