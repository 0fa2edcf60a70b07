"""Level 4: two processes, each with a device."""
