"""Processes in which groups of checks run: a single one, several ranks, forked, watched."""
