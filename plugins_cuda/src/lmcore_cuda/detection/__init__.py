"""Facts that the probe decides by: GPUs, driver, torch's build; torch-free."""
