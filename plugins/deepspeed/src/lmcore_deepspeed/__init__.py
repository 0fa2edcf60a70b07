"""DeepSpeed as a training engine of lmcore, a plugin."""
