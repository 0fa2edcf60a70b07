"""Stand-in of Triton for Intel GPUs."""
