"""Calls of plugin code in processes of their own, so that a crash is reported and survived."""
