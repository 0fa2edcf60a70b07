"""DeepSpeed's engine behind the trainer's own interface."""
