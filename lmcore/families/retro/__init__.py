"""Retro: a decoder that reads, for each chunk of its text, similar chunks of a database."""
