"""HTTP server of generation: `lmcore serve`."""
