"""Detection of a checkpoint in a directory, without torch: its format, and its steps."""
