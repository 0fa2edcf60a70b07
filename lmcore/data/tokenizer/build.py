"""From `--tokenizer-type` and its options to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lmcore.data.tokenizer.base import Tokenizer, TokenizerFactory
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.null import NullTokenizer
from lmcore.errors import ConfigError, suggestion
from lmcore.plugins.registrations import Registrations

__all__ = ["build_tokenizer", "tokenizer_types"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


def _byte(
    *, vocab_file: str | None, merge_file: str | None, vocab_size: int | None
) -> ByteTokenizer:
    del vocab_file, merge_file, vocab_size  # the type has no options
    return ByteTokenizer()


def _null(
    *, vocab_file: str | None, merge_file: str | None, vocab_size: int | None
) -> NullTokenizer:
    del vocab_file, merge_file
    if vocab_size is None:
        raise ConfigError("`NullTokenizer` needs `--vocab-size`")
    return NullTokenizer(vocab_size)


def _gpt2(
    *, vocab_file: str | None, merge_file: str | None, vocab_size: int | None
) -> GPT2BPETokenizer:
    del vocab_size  # the file has it
    if vocab_file is None or merge_file is None:
        missing = [
            flag
            for flag, value in (("--vocab-file", vocab_file), ("--merge-file", merge_file))
            if value is None
        ]
        raise ConfigError(
            f"`GPT2BPETokenizer` needs {' and '.join(f'`{flag}`' for flag in missing)}",
            hint="give the tokenizer's `vocab.json` and `merges.txt`, or use "
            "`--tokenizer-type ByteTokenizer`, which needs no files",
        )
    return GPT2BPETokenizer(vocab_file, merge_file)


_BUILT_IN: Mapping[str, TokenizerFactory] = MappingProxyType(
    {"ByteTokenizer": _byte, "GPT2BPETokenizer": _gpt2, "NullTokenizer": _null}
)


def tokenizer_types(extra: Mapping[str, TokenizerFactory] = _NONE) -> tuple[str, ...]:
    """Return the names that `build_tokenizer` takes, sorted."""
    return tuple(sorted({*_BUILT_IN, *extra}))


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> Tokenizer:
    """Build the tokenizer of a type.

    Args:
        tokenizer_type: A built-in name, or one of *extra*.
        vocab_file: `vocab.json`, for the types that have one.
        merge_file: `merges.txt`, likewise.
        vocab_size: V of `NullTokenizer`.
        extra: The types that plugins registered; a built-in name cannot be replaced.

    Raises:
        ConfigError: Unknown type, an option missing, or a plugin's type with a built-in name.
        DataError: A file that is missing or unfit.
    """
    taken = sorted(_BUILT_IN.keys() & extra.keys())
    if taken:
        raise ConfigError(
            f"a plugin registers the tokenizer type `{taken[0]}`, which is built in",
            hint="the plugin must choose another name",
        )
    factory = _BUILT_IN.get(tokenizer_type) or extra.get(tokenizer_type)
    if factory is None:
        raise ConfigError(
            f"unknown tokenizer type `{tokenizer_type}`",
            why=extra.why_missing() if isinstance(extra, Registrations) else None,
            hint=suggestion(tokenizer_type, tokenizer_types(extra)),
        )
    return factory(vocab_file=vocab_file, merge_file=merge_file, vocab_size=vocab_size)
