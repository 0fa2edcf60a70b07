"""Cleaning of a corpus of JSON lines: `lmcore data clean`.

A chain of steps (`chain`) is divided into segments.  The document steps of a segment run in worker
processes, on one document at a time (`segment`); a segment ends with a corpus step, which needs all
documents, such as deduplication, and keeps them in a compressed file meanwhile (`document_store`).
`run` connects the segments and writes the result.
"""
