"""Stand-in for the folder of the normalizations."""
