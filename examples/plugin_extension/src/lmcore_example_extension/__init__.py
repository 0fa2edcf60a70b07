"""Arithmetic for lmcore: a corpus, a tokenizer, a command, a setting and a listener to runs."""
