"""Comparison of tokenizers of different types by the tokens of their ids.

A fingerprint covers type and files: `vocab.json` with `merges.txt`, and the `tokenizer.json` made
from both, have different ones.  To the weights of a model they are one tokenizer, since each id
selects the embedding of the same token.
"""

from __future__ import annotations

from lmcore.accelerator.tokenizer import Tokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer

__all__ = ["same_tokens"]

_END = "<|endoftext|>"


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if each id has the same token in both, and the same id ends a document.

    The spelling of every id is compared, in the alphabet of the files; the rules that split a text
    into tokens are not.  False for a type whose spellings are not known, such as a plugin's.
    """
    if first.vocab_size != second.vocab_size or first.eod != second.eod:
        return False
    one, other = _spellings(first), _spellings(second)
    return one is not None and one == other


def _spellings(tokenizer: Tokenizer) -> tuple[str, ...] | None:
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.spellings
    if isinstance(tokenizer, GPT2BPETokenizer):
        return tokenizer.tokens_by_id
    if isinstance(tokenizer, ByteTokenizer):
        return (*byte_alphabet(), _END)
    return None
