"""Calls of plugin code in separate processes, so that a crash is reported and survived."""
