"""How a tokenizer is built, alike in every command that takes one."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option
from lmcore.config.tokenizer import BUILT_IN_TYPES

__all__ = ["TYPES", "TokenizerSection"]

TYPES = f"{', '.join(BUILT_IN_TYPES)}, or a plugin's"
"""The names of the types, for the help of `tokenizer_type`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """Files and options of a tokenizer; a command's section builds on it.

    It adds `tokenizer_type` and `vocab_size`, whose defaults each tells for itself.
    """

    vocab_file: str | None = option(
        None, "Vocabulary of the tokenizer: vocab.json, for WordPiece vocab.txt.", metavar="FILE"
    )
    merge_file: str | None = option(None, "merges.txt of the tokenizer.", metavar="FILE")
    tokenizer_model: str | None = option(
        None, "SentencePiece model, or directory of a pretrained tokenizer.", metavar="FILE"
    )
    tokenizer_name_or_path: str | None = option(
        None,
        "Directory of a pretrained tokenizer, or its tokenizer.json; nothing is downloaded.",
        metavar="PATH",
    )
    vocab_extra_ids: int = option(
        0, "Sentinel tokens added to the vocabulary.", minimum=0, maximum=100_000
    )
    add_special_tokens: bool | None = option(
        None,
        "Give each text the tokens that the tokenizer puts around it; default: as Megatron does "
        "for the type.",
    )
    parse_special_tokens: bool = option(
        False, "Make a special token of text that spells one; default: it is ordinary text."
    )
