"""Stand-in for the folder of the compiled parts."""
