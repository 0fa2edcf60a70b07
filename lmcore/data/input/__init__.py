"""Inputs of `lmcore data`: files in several formats, read in batches of bounded size.

`find_inputs` says which files there are and of which format, `read_input` yields their documents:
`LineBatch` of raw JSON lines, `TextBatch` of everything else.  One module for each format, all of
one shape: `read(file, options)`.
"""
