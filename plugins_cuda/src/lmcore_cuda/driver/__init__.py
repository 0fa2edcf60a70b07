"""NVIDIA's driver: its libraries, read without torch."""
