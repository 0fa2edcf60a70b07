"""Comparison of tokenizers: by the tokens of their ids, or by the name of a type alone.

A fingerprint covers type and files: `vocab.json` with `merges.txt`, and the `tokenizer.json` made
from both, have different ones.  To the weights of a model they are one tokenizer, since each id
selects the embedding of the same token.  Some checkpoints record no more than the name of a type.
"""

from __future__ import annotations

from lmcore.base.errors import counted, printable
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerIdentity
from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer

__all__ = ["may_be_same", "same_tokens", "token_difference"]

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
_SHOWN = 3
"""Most tokens that a difference names."""


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if each id has the same token in both, and the same id ends a document.

    The spelling of every id is compared, in the alphabet of the files; the rules that split a text
    into tokens are not.  False for a type whose spellings are not known, such as a plugin's.
    """
    if first.vocab_size != second.vocab_size or first.eod != second.eod:
        return False
    one, other = _spellings(first), _spellings(second)
    return one is not None and one == other


def token_difference(
    first: Tokenizer | TokenizerIdentity,
    second: Tokenizer,
    names: tuple[str, str],
    *,
    sizes: bool = True,
) -> str | None:
    """Return what differs between the vocabularies of two tokenizers; None if it is not known.

    Named are the first tokens that only one of them has, else the first token with another id,
    else the numbers of tokens or the tokens that end a document.

    Args:
        first: One tokenizer, or its record if it cannot be built.
        second: The other.
        names: Nouns for both, such as "the dataset's" and "the checkpoint's".
        sizes: False if the message names the numbers of tokens already.
    """
    one, other = _spellings(first), _spellings(second)
    if one is not None and other is not None:
        sides = [
            f"only {name} has {_listed(lacking)}"
            for name, lacking in zip(
                names, (_lacking(one, set(other)), _lacking(other, set(one))), strict=True
            )
            if lacking
        ]
        if sides:
            return " and ".join(sides)
        for number, (token, instead) in enumerate(zip(one, other, strict=False)):
            if token != instead:
                meant, other_meant = (_shown(text) for text in (token, instead))
                return f"id {number} is {meant} in {names[0]} and {other_meant} in {names[1]}"
    if first.vocab_size != second.vocab_size:
        counts = f"{names[0]} has {first.vocab_size:,} tokens and {names[1]} {second.vocab_size:,}"
        return counts if sizes else None
    if first.eod != second.eod:
        ends = [
            "no id" if tokenizer.eod is None else f"id {tokenizer.eod}"
            for tokenizer in (first, second)
        ]
        return f"{ends[0]} ends a document in {names[0]} and {ends[1]} in {names[1]}"
    return None


def _lacking(tokens: tuple[str, ...], others: set[str]) -> list[str]:
    """Return the tokens that are not among the others; an id without a token has none."""
    return [token for token in tokens if token and token not in others]


def _shown(token: str) -> str:
    """Return a token for a message; it may have any characters, or be none."""
    return f"`{printable(token):.40}`" if token else "no token"


def _listed(tokens: list[str]) -> str:
    """Return the first of some tokens, as words."""
    shown = [_shown(token) for token in tokens[:_SHOWN]]
    more = len(tokens) - _SHOWN
    if more > 0:
        return f"{', '.join(shown)} and {counted(more, 'other token')}"
    *most, last = shown
    return f"{', '.join(most)} and {last}" if most else last


def _spellings(tokenizer: Tokenizer | TokenizerIdentity) -> tuple[str, ...] | None:
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
