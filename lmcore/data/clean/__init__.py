"""Cleaning a corpus of JSON lines: `lmcore data clean`.

A chain of steps (`chain`) is cut into segments.  The steps inside a segment look at one document at
a time and run in worker processes (`work`); a segment ends with a step that needs all of
the documents, such as finding duplicates, which keeps them in a compressed file meanwhile
(`spool`).  `run` puts the segments together and writes what is left.
"""
