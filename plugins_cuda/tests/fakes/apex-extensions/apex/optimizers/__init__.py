"""By this folder the real package is known."""
