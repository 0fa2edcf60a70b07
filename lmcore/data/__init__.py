"""Data from text to micro-batches: tokenizers, indexed datasets, sample indices, loading.

`prepare` turns JSON lines into `.bin`/`.idx` pairs, `IndexedDataset` memory-maps them, `GPTDataset`
cuts them into samples, and `BatchLoader` collates samples into micro-batches.  Only
`lmcore.data.loading` imports torch; import names from their modules.
"""
