"""Training of tokenizers from text."""
