"""What every other folder stands on: errors, files that survive a crash, locks, threads, signals.

`errors` and `bounded_file` are public for plugins.
"""
