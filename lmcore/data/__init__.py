"""From text to micro-batches: tokenizers, indexed datasets, sample indices and loading.

The flow: `prepare` turns JSON lines into `.bin`/`.idx` pairs, `IndexedDataset` maps them,
`GPTDataset` cuts them into samples, `BatchLoader` makes micro-batches of the samples.  Only
`lmcore.data.loading.loader` imports torch; import what is needed from the modules themselves.
"""
