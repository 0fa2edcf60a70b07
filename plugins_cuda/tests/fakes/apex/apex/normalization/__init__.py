"""Stands for the folder of the normalizations."""
