"""Files of a small GPT-2 tokenizer, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

from lmcore.data.tokenizer.bpe_files import byte_alphabet

# "hello" is one token, " world" two, everything else bytes.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d"]


def write_bpe_files(folder: Path) -> tuple[Path, Path]:
    """Write a `vocab.json` of 265 tokens and its `merges.txt`, and return their paths."""
    tokens = [*byte_alphabet(), *(rule.replace(" ", "") for rule in MERGES), "<|endoftext|>"]
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    merges.write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    return vocab, merges
