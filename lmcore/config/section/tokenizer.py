"""Tokenizer options shared by all commands that take a tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lmcore.config.need import Need, Situation, setting
from lmcore.config.option import CHECKED, FREE, INPUT_PATH, option
from lmcore.config.tokenizer import BUILT_IN_TYPES

__all__ = ["TYPES", "TokenizerSection"]

TYPES = f"{', '.join(BUILT_IN_TYPES)}, or a plugin's"
"""Names of the types, for the help text of `tokenizer_type`."""


def _taken(name: str) -> Need:
    """Return the condition that the tokenizer's type takes an option; a plugin's may."""
    types = [kind for kind, options in BUILT_IN_TYPES.items() if name in options.allowed]

    def met(run: Situation) -> bool:
        kind = run.config.data.tokenizer_type
        return kind is None or kind not in BUILT_IN_TYPES or kind in types

    return dataclasses.replace(setting("--tokenizer-type", *types), met=met)


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """Files and options of a tokenizer; the base of a command's section.

    The command adds `tokenizer_type` and `vocab_size`, with its own defaults.
    """

    vocab_file: str | None = option(
        None,
        "Vocabulary of the tokenizer: vocab.json, or vocab.txt for WordPiece.",
        metavar="FILE",
        on_resume=FREE,
        needs=_taken("vocab_file"),
        paths=INPUT_PATH,
    )
    merge_file: str | None = option(
        None,
        "merges.txt of the tokenizer.",
        metavar="FILE",
        on_resume=FREE,
        needs=_taken("merge_file"),
        paths=INPUT_PATH,
    )
    tokenizer_model: str | None = option(
        None,
        "SentencePiece model, or directory of a pretrained tokenizer.",
        metavar="PATH",
        on_resume=FREE,
        needs=_taken("tokenizer_model"),
        paths=INPUT_PATH,
    )
    tokenizer_name_or_path: str | None = option(
        None,
        "Directory of a pretrained tokenizer, or its tokenizer.json; nothing is downloaded.",
        metavar="PATH",
        on_resume=FREE,
        needs=_taken("tokenizer_name_or_path"),
        paths=INPUT_PATH,
    )
    vocab_extra_ids: int = option(
        0,
        "Sentinel tokens added to the vocabulary.",
        minimum=0,
        maximum=100_000,
        on_resume=CHECKED,
        needs=_taken("vocab_extra_ids"),
    )
    add_special_tokens: bool | None = option(
        None,
        "Add the special tokens that the tokenizer puts around a text, or that WordPiece puts "
        "after its vocabulary (`[BOS]`, `[EOS]`); default: as Megatron does for the type.",
        needs=_taken("add_special_tokens"),
    )
    parse_special_tokens: bool = option(
        False,
        "Encode text that spells a special token as that token; default: as ordinary text.",
        needs=_taken("parse_special_tokens"),
    )
