"""Stand-in for the compiled part of the normalizations of apex."""
