"""Stand-in of Triton for other GPUs."""
