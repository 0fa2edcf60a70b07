"""Cleaning of corpora and training of tokenizers, a plugin of lmcore."""
