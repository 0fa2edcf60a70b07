"""Building a tokenizer from `--tokenizer-type` and its options.

The core passes `TokenizerSettings`; a plugin's factory takes the three options of the plugin
contract.  The module of a type, and its library, is imported when the type is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, suggestion
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings, TypeOptions
from lmcore.contract.tokenizer import Tokenizer, TokenizerFactory
from lmcore.data.gpt2_preload import BpePreload
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.null import NullTokenizer

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet
    from lmcore.plugin.registrations import Registrations

__all__ = ["build_tokenizer", "registered_types", "tokenizer_from", "tokenizer_types"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_PATHS = ("vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path")
_PLUGIN = TypeOptions(takes=("vocab_file", "merge_file"))  # as in the plugin contract


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
    from lmcore.data.tokenizer.pretrained.pretrained_tokenizer import PretrainedTokenizer

    if settings.tokenizer_name_or_path is not None and settings.tokenizer_model is not None:
        raise ConfigError(
            "`--tokenizer-name-or-path` and `--tokenizer-model` exclude each other",
            why=f"`{settings.tokenizer_type}` is read from one directory",
            hint="keep one of them",
        )
    return PretrainedTokenizer(settings)


_BUILD: Mapping[str, Callable[[TokenizerSettings], Tokenizer]] = MappingProxyType(
    {
        "BertWordPieceCase": _wordpiece,
        "BertWordPieceLowerCase": _wordpiece,
        "ByteTokenizer": lambda _: ByteTokenizer(),
        "GPTSentencePieceTokenizer": _sentence_piece,
        "HFTokenizer": _pretrained,
        "HuggingFaceTokenizer": _pretrained,
        "Llama2Tokenizer": _sentence_piece,
        "NullTokenizer": lambda settings: NullTokenizer(settings.vocab_size or 0),
        "PretrainedFromHF": _pretrained,
        "SentencePieceTokenizer": _sentence_piece,
    }
)


def tokenizer_types(extra: Mapping[str, TokenizerFactory] = _NONE) -> tuple[str, ...]:
    """Return the names of all tokenizer types, sorted.

    Args:
        extra: types that plugins registered, by name.
    """
    return tuple(sorted({*BUILT_IN_TYPES, *extra}))


def registered_types(plugins: PluginSet) -> Registrations[TokenizerFactory]:
    """Return the types that usable plugins register, by name; built-in names are reserved."""
    from lmcore.plugin import registrations

    return registrations.registered_types(plugins, dict.fromkeys(tokenizer_types(), "lmcore"))


def build_tokenizer(
    tokenizer_type: str, *, extra: Mapping[str, TokenizerFactory] = _NONE, **options: Any
) -> Tokenizer:
    """Build a tokenizer from its type and the options of `TokenizerSettings`."""
    return tokenizer_from(TokenizerSettings(tokenizer_type, **options), extra=extra)


def tokenizer_from(
    settings: TokenizerSettings,
    *,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    preload: BpePreload | None = None,
) -> Tokenizer:
    """Build the tokenizer that *settings* describe.

    Args:
        settings: type and options.
        extra: types that plugins registered, by name; a built-in name cannot be replaced.
        preload: reader of the files of a `GPT2BPETokenizer`, if one was started.

    Raises:
        ConfigError: no type or an unknown one, an option that is missing or that the type does not
            take, or a plugin's type with a built-in name.
        DataError: a file that is missing or invalid.
    """
    taken = sorted(BUILT_IN_TYPES.keys() & extra.keys())
    if taken:
        raise ConfigError(
            f"a plugin registers the tokenizer type `{taken[0]}`, which is built in",
            hint="the plugin must choose another name",
        )
    kind = settings.tokenizer_type
    if kind is not None and kind in BUILT_IN_TYPES:
        return _built_in(settings, kind, BUILT_IN_TYPES[kind], preload)
    if kind is None or kind not in extra:
        from lmcore.plugin.registrations import Registrations

        raise ConfigError(
            f"unknown tokenizer type `{kind}`" if kind else "no tokenizer type is given",
            why=extra.why_missing() if isinstance(extra, Registrations) else None,
            hint=suggestion(kind or "", tokenizer_types(extra)),
        )
    if (problem := settings.unwanted(_PLUGIN)) is not None:
        raise problem
    return extra[kind](
        vocab_file=settings.vocab_file,
        merge_file=settings.merge_file,
        vocab_size=settings.vocab_size,
    )


def _built_in(
    settings: TokenizerSettings, kind: str, options: TypeOptions, preload: BpePreload | None
) -> Tokenizer:
    if missing := settings.missing(options):
        raise ConfigError(f"`{kind}` needs {' and '.join(missing)}", hint=options.open_hint)
    if (problem := settings.unwanted(options)) is not None:
        raise problem
    if kind == GPT2BPETokenizer.name:
        files = str(settings.vocab_file), str(settings.merge_file)
        return GPT2BPETokenizer(*files, preload=preload)
    if "vocab_size" not in options.allowed:  # the size that the model is padded to
        settings = dataclasses.replace(settings, vocab_size=None)
    tokenizer = _BUILD[kind](settings)  # an error names the files as they were given
    if isinstance(tokenizer, FileTokenizer):
        # Absolute: metadata and worker processes find the files from any directory.
        changes: dict[str, Any] = {
            name: str(Path(value).absolute())
            for name in _PATHS
            if (value := getattr(settings, name)) is not None
        }
        tokenizer.settings = dataclasses.replace(settings, **changes)
    return tokenizer
