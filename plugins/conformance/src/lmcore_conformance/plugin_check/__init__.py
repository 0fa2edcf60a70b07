"""`lmcore plugin check`: one plugin's hooks, records, kernels, device and source."""
