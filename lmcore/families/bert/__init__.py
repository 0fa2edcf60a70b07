"""BERT: a bidirectional encoder that restores masked tokens and finds swapped sentences."""
