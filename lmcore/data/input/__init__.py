"""Input files of `lmcore data` in several formats, read in batches of bounded size.

`find_inputs` finds the files and their formats, `read_input` yields their documents: `LineBatch` of
raw JSON lines, `TextBatch` of all other formats.  Each format has one module with a function
`read(file, options)`.
"""
