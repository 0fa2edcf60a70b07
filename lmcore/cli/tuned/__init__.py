"""`lmcore evaluate` for tasks with a head: fine-tuning, and scores of fine-tuned checkpoints."""
