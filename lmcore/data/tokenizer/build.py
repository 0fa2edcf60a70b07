"""From `--tokenizer-type` and its options to a tokenizer.

The core passes `TokenizerSettings` on; a plugin's factory is called with the three options that
the contract names.  A type's own module is loaded when it is built, with the library it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer.base import Tokenizer, TokenizerFactory
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.null import NullTokenizer
from lmcore.errors import ConfigError, suggestion
from lmcore.plugins.registrations import Registrations

__all__ = ["build_tokenizer", "tokenizer_from", "tokenizer_types"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_PATHS = ("vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path")
_PRETRAINED = ("tokenizer_name_or_path", "tokenizer_model")


@dataclass(frozen=True)
class _BuiltIn:
    """A type of lmcore's own.

    Attributes:
        build: Makes it; every option that it needs is there.
        needs: The options without which it cannot be made; of a tuple of them, one.
        takes: Those that it takes besides.
        hint: What to do where one is missing.
    """

    build: Callable[[TokenizerSettings], Tokenizer]
    needs: tuple[str | tuple[str, ...], ...] = ()
    takes: tuple[str, ...] = ()
    hint: str | None = None

    @property
    def allowed(self) -> tuple[str, ...]:
        needed = [(one,) if isinstance(one, str) else one for one in self.needs]
        return (*(name for names in needed for name in names), *self.takes)


def _null(settings: TokenizerSettings) -> Tokenizer:
    return NullTokenizer(settings.vocab_size or 0)


def _gpt2(settings: TokenizerSettings) -> Tokenizer:
    return GPT2BPETokenizer(str(settings.vocab_file), str(settings.merge_file))


def _wordpiece(settings: TokenizerSettings) -> Tokenizer:
    from lmcore.data.tokenizer.wordpiece import BertWordPieceTokenizer

    return BertWordPieceTokenizer(settings)


def _sentence_piece(settings: TokenizerSettings) -> Tokenizer:
    from lmcore.data.tokenizer import sentence_piece

    kind = {
        "SentencePieceTokenizer": sentence_piece.SentencePieceTokenizer,
        "GPTSentencePieceTokenizer": sentence_piece.GPTSentencePieceTokenizer,
        "Llama2Tokenizer": sentence_piece.Llama2Tokenizer,
    }[str(settings.tokenizer_type)]
    return kind(settings)


def _pretrained(settings: TokenizerSettings) -> Tokenizer:
    from lmcore.data.tokenizer.pretrained import PretrainedTokenizer

    given = [name for name in _PRETRAINED if getattr(settings, name) is not None]
    if len(given) > 1:
        raise ConfigError(
            "`--tokenizer-name-or-path` and `--tokenizer-model` exclude each other",
            why=f"`{settings.tokenizer_type}` is read from one directory",
            hint="keep one of them",
        )
    return PretrainedTokenizer(settings)


_WORDPIECE = _BuiltIn(
    _wordpiece,
    needs=("vocab_file",),
    takes=("vocab_extra_ids",),
    hint="give the `vocab.txt` of the tokenizer; `lmcore data train-tokenizer` makes one",
)
_MODEL_HINT = "give a `.model` file of SentencePiece; `lmcore data train-tokenizer` makes one"
_PRETRAINED_TYPE = _BuiltIn(
    _pretrained,
    needs=(_PRETRAINED,),
    takes=("vocab_extra_ids", "add_special_tokens", "parse_special_tokens"),
    hint="give a directory with a `tokenizer.json`",
)

_BUILT_IN: Mapping[str, _BuiltIn] = MappingProxyType(
    {
        "BertWordPieceCase": _WORDPIECE,
        "BertWordPieceLowerCase": _WORDPIECE,
        "ByteTokenizer": _BuiltIn(lambda _: ByteTokenizer()),
        "GPT2BPETokenizer": _BuiltIn(
            _gpt2,
            needs=("vocab_file", "merge_file"),
            hint="give the tokenizer's `vocab.json` and `merges.txt`, or use "
            "`--tokenizer-type ByteTokenizer`, which needs no files",
        ),
        "GPTSentencePieceTokenizer": _BuiltIn(
            _sentence_piece, needs=("tokenizer_model",), hint=_MODEL_HINT
        ),
        "HFTokenizer": _PRETRAINED_TYPE,
        "HuggingFaceTokenizer": _PRETRAINED_TYPE,
        "Llama2Tokenizer": _BuiltIn(
            _sentence_piece,
            needs=("tokenizer_model",),
            takes=("add_special_tokens",),
            hint=_MODEL_HINT,
        ),
        "NullTokenizer": _BuiltIn(_null, needs=("vocab_size",)),
        "PretrainedFromHF": _PRETRAINED_TYPE,
        "SentencePieceTokenizer": _BuiltIn(
            _sentence_piece,
            needs=("tokenizer_model",),
            takes=("vocab_extra_ids", "parse_special_tokens"),
            hint=_MODEL_HINT,
        ),
    }
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
    tokenizer_model: str | None = None,
    tokenizer_name_or_path: str | None = None,
    vocab_extra_ids: int = 0,
    add_special_tokens: bool | None = None,
    parse_special_tokens: bool = False,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> Tokenizer:
    """Do what `tokenizer_from` does, with the settings given one by one."""
    settings = TokenizerSettings(
        tokenizer_type,
        vocab_file,
        merge_file,
        vocab_size,
        tokenizer_model,
        tokenizer_name_or_path,
        vocab_extra_ids,
        add_special_tokens,
        parse_special_tokens,
    )
    return tokenizer_from(settings, extra=extra)


def tokenizer_from(
    settings: TokenizerSettings, *, extra: Mapping[str, TokenizerFactory] = _NONE
) -> Tokenizer:
    """Build the tokenizer of settings.

    Args:
        settings: The type and its options.
        extra: The types that plugins registered; a built-in name cannot be replaced.

    Raises:
        ConfigError: No or an unknown type, an option missing or too many, or a plugin's type with
            a built-in name.
        DataError: A file that is missing or unfit.
    """
    taken = sorted(_BUILT_IN.keys() & extra.keys())
    if taken:
        raise ConfigError(
            f"a plugin registers the tokenizer type `{taken[0]}`, which is built in",
            hint="the plugin must choose another name",
        )
    kind = settings.tokenizer_type
    if kind is not None and kind in _BUILT_IN:
        return _built_in(settings, kind, _BUILT_IN[kind])
    if kind is None or kind not in extra:
        raise ConfigError(
            f"unknown tokenizer type `{kind}`" if kind else "no tokenizer type is given",
            why=extra.why_missing() if isinstance(extra, Registrations) else None,
            hint=suggestion(kind or "", tokenizer_types(extra)),
        )
    settings.require_only(("vocab_file", "merge_file"), kind=kind)
    return extra[kind](
        vocab_file=settings.vocab_file,
        merge_file=settings.merge_file,
        vocab_size=settings.vocab_size,
    )


def _built_in(settings: TokenizerSettings, kind: str, built_in: _BuiltIn) -> Tokenizer:
    missing = []
    for needed in built_in.needs:
        names = (needed,) if isinstance(needed, str) else needed
        if all(getattr(settings, name) is None for name in names):
            missing.append(" or ".join(f"`--{name.replace('_', '-')}`" for name in names))
    if missing:
        raise ConfigError(f"`{kind}` needs {' and '.join(missing)}", hint=built_in.hint)
    settings.require_only(built_in.allowed, kind=kind)
    # Absolute: metadata and workers find the files from any directory.
    changes: dict[str, Any] = {
        name: str(Path(value).absolute())
        for name in _PATHS
        if (value := getattr(settings, name)) is not None
    }
    if "vocab_size" not in built_in.allowed:
        changes["vocab_size"] = None  # it is the size that the model is padded to
    return built_in.build(dataclasses.replace(settings, **changes))
