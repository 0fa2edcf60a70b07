"""Comparison of tokenizers: by the tokens of their ids, or by the name of a type alone.

A fingerprint covers type and files: `vocab.json` with `merges.txt`, and the `tokenizer.json` made
from both, have different ones.  To the weights of a model they are one tokenizer, since each id
selects the embedding of the same token.  Some checkpoints record no more than the name of a type.
"""

from __future__ import annotations

from lmcore.config.tokenizer import BUILT_IN_TYPES
from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer

__all__ = ["may_be_same", "same_tokens"]

_END = "<|endoftext|>"
_BYTES, _NUMBERS = "ByteTokenizer", "NullTokenizer"
"""Types without files."""
_PRETRAINED = frozenset(
    name for name, options in BUILT_IN_TYPES.items() if options is BUILT_IN_TYPES["HFTokenizer"]
)
"""Types that read a `tokenizer.json`, which any vocabulary can be written as."""
_SENTENCE_PIECE = frozenset(
    {"GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"}
)
"""Types that read a SentencePiece model."""


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


def may_be_same(recorded: str, given: str) -> bool:
    """Return False if a tokenizer is surely not the one that a checkpoint names.

    Types with files may have the same vocabulary under another name, such as a `vocab.json` that
    was written as a `tokenizer.json`; another program's types are not known here.

    Args:
        recorded: Type that the checkpoint names.
        given: Type of the tokenizer.
    """
    if recorded == given:
        return True
    names = {recorded, given}
    if _NUMBERS in names:
        return False
    if names & _PRETRAINED or names <= _SENTENCE_PIECE:
        return True
    return _BYTES not in names and not names <= BUILT_IN_TYPES.keys()
