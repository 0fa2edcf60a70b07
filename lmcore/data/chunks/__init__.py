"""Chunks of documents, and the neighbours of samples among them, in checksummed shards on disk."""
