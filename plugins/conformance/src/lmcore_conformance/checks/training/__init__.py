"""Level 3: training with the core and with the library."""
