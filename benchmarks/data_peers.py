"""Megatron's two preparing scripts, rebuilt on what the package registry has of them.

`preprocess_data.py` and its fast path are not in the megatron-core package.  Here they are as far
as they matter: the same imports, a pool of processes that each parse a line and call the
tokenizer, or gigatoken's batches; and megatron-core's own IndexedDatasetBuilder, fed document by
document.  Run by `data.py` in separate processes:

    python data_peers.py default|fast INPUT PREFIX VOCAB MERGES WORKERS

It prints the seconds by its timer, which starts after imports and tokenizer, as Megatron's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

_END = "<|endoftext|>"
_VOCAB_SIZE = 50257


def transformers_tokenizer(vocab_file: str, merge_file: str) -> Any:
    """Return transformers' GPT-2 tokenizer from local files."""
    from transformers import GPT2Tokenizer

    vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
    lines = Path(merge_file).read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    return GPT2Tokenizer(vocab=vocabulary, merges=merges)


class Encoder:
    """Work of each process of the pool on a line."""

    tokenizer: Any = None
    end = 0

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self.files = (vocab_file, merge_file)

    def initialize(self) -> None:
        """Build the tokenizer once in a process."""
        Encoder.tokenizer = transformers_tokenizer(*self.files)
        Encoder.end = Encoder.tokenizer.convert_tokens_to_ids(_END)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        """Return ids, lengths and the bytes read."""
        ids = Encoder.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
        lengths = []
        if ids:
            ids.append(Encoder.end)
            lengths.append(len(ids))
        return ids, lengths, len(line)


def builder_of(prefix: str) -> IndexedDatasetBuilder:
    """Return megatron-core's builder, with the type that it chooses for the vocabulary."""
    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(_VOCAB_SIZE))


def default(source: str, prefix: str, vocab_file: str, merge_file: str, workers: int) -> float:
    """Do as `preprocess_data.py --append-eod --workers N` does; return the seconds."""
    encoder = Encoder(vocab_file, merge_file)
    transformers_tokenizer(vocab_file, merge_file)  # the parent builds one for the vocabulary size
    with Path(source).open(encoding="utf-8") as lines:
        pool = multiprocessing.Pool(workers, initializer=encoder.initialize)
        encoded = pool.imap(encoder.encode, lines, 32)
        builder = builder_of(prefix)
        began = time.time()
        total = 0
        for count, (ids, lengths, size) in enumerate(encoded, 1):
            total += size
            if lengths:
                builder.add_document(ids, lengths)
            if count % 1000 == 0:
                told = f"{count / (time.time() - began):.1f} docs/s"
                print(f"Processed {count} documents ({told}).", file=sys.stderr)
        pool.close()
        pool.join()
    builder.finalize(f"{prefix}.idx")
    return time.time() - began


def batches(source: str, count: int) -> Iterator[list[str]]:
    """Yield the texts of so many lines at a time."""
    texts: list[str] = []
    with Path(source).open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == count:
                yield texts
                texts = []
    if texts:
        yield texts


def fast(source: str, prefix: str, vocab_file: str, merge_file: str) -> float:
    """Do as the fast path with gigatoken does: batches to the library, documents to the builder."""
    import gigatoken
    import numpy as np

    transformers_tokenizer(vocab_file, merge_file)
    vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
    end = vocabulary[_END]
    tokenizer = gigatoken.Tokenizer.from_json(library_json(vocabulary, merge_file))
    builder = builder_of(prefix)
    began = time.time()
    for texts in batches(source, 1024):
        for row in tokenizer.encode_batch(texts):
            ids = np.append(np.asarray(row), end)
            if len(ids) > 1:
                builder.add_document(torch.from_numpy(ids.astype(np.int64)), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return time.time() - began


def library_json(vocabulary: dict[str, int], merge_file: str) -> str:
    """Return the two files as a `tokenizer.json`."""
    lines = Path(merge_file).read_text(encoding="utf-8").split("\n")[1:]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": [line.split(" ") for line in lines if line],
            },
        }
    )


if __name__ == "__main__":
    which, source, prefix, vocab_file, merge_file, workers = sys.argv[1:]
    if which == "default":
        print(default(source, prefix, vocab_file, merge_file, int(workers)))
    else:
        print(fast(source, prefix, vocab_file, merge_file))
