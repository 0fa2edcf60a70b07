"""Foundations of every other folder: errors, files that survive a crash, locks, threads, signals.

`errors` and `bounded_file` are public for plugins.
"""
