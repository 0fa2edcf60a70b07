"""`lmcore data prepare`: text to an indexed dataset, in parallel, resumable."""
