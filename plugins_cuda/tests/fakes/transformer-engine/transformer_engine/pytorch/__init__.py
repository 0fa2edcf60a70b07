"""Stand-in for its part for torch."""
