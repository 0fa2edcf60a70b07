"""The options that say how a tokenizer is built, alike in every command that takes them."""

from __future__ import annotations

from typing import Any

from lmcore.config.option import option
from lmcore.config.tokenizer import BUILT_IN_TYPES

__all__ = [
    "TYPES",
    "add_special_tokens_option",
    "merge_file_option",
    "parse_special_tokens_option",
    "tokenizer_model_option",
    "tokenizer_name_or_path_option",
    "vocab_extra_ids_option",
    "vocab_file_option",
]

TYPES = f"{', '.join(BUILT_IN_TYPES)}, or a plugin's"
"""The names of the types, for the help of `tokenizer_type`."""


def vocab_file_option() -> Any:
    """Return the field `vocab_file`."""
    return option(
        None, "Vocabulary of the tokenizer: vocab.json, for WordPiece vocab.txt.", metavar="FILE"
    )


def merge_file_option() -> Any:
    """Return the field `merge_file`."""
    return option(None, "merges.txt of the tokenizer.", metavar="FILE")


def tokenizer_model_option() -> Any:
    """Return the field `tokenizer_model`."""
    return option(
        None, "SentencePiece model, or directory of a pretrained tokenizer.", metavar="FILE"
    )


def tokenizer_name_or_path_option() -> Any:
    """Return the field `tokenizer_name_or_path`."""
    return option(
        None,
        "Directory of a pretrained tokenizer, or its tokenizer.json; nothing is downloaded.",
        metavar="PATH",
    )


def vocab_extra_ids_option() -> Any:
    """Return the field `vocab_extra_ids`."""
    return option(0, "Sentinel tokens added to the vocabulary.", minimum=0, maximum=100_000)


def add_special_tokens_option() -> Any:
    """Return the field `add_special_tokens`."""
    return option(
        None,
        "Give each text the tokens that the tokenizer puts around it; default: as Megatron does "
        "for the type.",
    )


def parse_special_tokens_option() -> Any:
    """Return the field `parse_special_tokens`."""
    return option(
        False, "Make a special token of text that spells one; default: it is ordinary text."
    )
