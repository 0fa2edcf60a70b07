"""Conversations: chat templates, rendered in a process with limits, and their history."""
