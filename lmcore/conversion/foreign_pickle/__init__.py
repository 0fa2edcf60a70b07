"""Pickle files of other programs, read without running code from them."""
