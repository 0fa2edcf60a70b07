"""Filters of single documents: addresses, repair of text, length, language, evaluation n-grams."""
