"""Level 2: every op, by every kernel."""
