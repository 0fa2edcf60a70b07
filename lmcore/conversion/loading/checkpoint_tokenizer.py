"""Tokenizer of a checkpoint: the user's choice, the run's copy, or the files of another format."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings, example_flags
from lmcore.conversion.native.read import LmcoreState
from lmcore.data.tokenizer import (
    Tokenizer,
    TokenizerFactory,
    special_ids,
    tokenizer_from,
    tokenizer_types,
)
from lmcore.data.tokenizer.comparison import may_be_same, same_tokens, token_difference
from lmcore.data.tokenizer.saved import load_tokenizer
from lmcore.model.family import answers_prompts

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.conversion.state import ModelState

__all__ = ["NO_CHOICE", "find_tokenizer", "has_own", "no_tokenizer", "tokenizer_of"]

logger = logging.getLogger(__name__)

NO_CHOICE = TokenizerSettings()
"""Settings that leave the choice to the checkpoint."""
_DIRECTORY = "tokenizer"
_PRETRAINED = "PretrainedFromHF"
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


def tokenizer_of(
    state: ModelState,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint of any format; None if it has none.

    Args:
        state: State of the checkpoint.
        choice: Tokenizer chosen by the user.
        extra: Tokenizer types that plugins registered.

    Raises:
        ConfigError: It has more ids than the model, or is not the tokenizer of the run.
        DataError: Its files are missing or invalid.
    """
    if choice != NO_CHOICE and state.tokenizer_type is not None:
        choice = _of_recorded_type(state, choice, state.tokenizer_type, extra)
    if isinstance(state, LmcoreState):
        if choice == NO_CHOICE and not has_own(state.checkpoint, state.manifest):
            return None
        tokenizer = find_tokenizer(state.checkpoint, state.manifest, choice, extra)
    else:
        settings = choice if choice != NO_CHOICE else state.tokenizer
        if settings is None:
            return None
        tokenizer = tokenizer_from(settings, extra=extra)
        if choice != NO_CHOICE and state.tokenizer_type is not None:
            _require_recorded(state, tokenizer)
    rows, ids = state.vocab_size or state.shape.padded_vocab_size, tokenizer.vocab_size
    if ids > rows:
        hint = "give the tokenizer that the model was trained with"
        if choice == NO_CHOICE and not isinstance(state, LmcoreState):
            hint = "add rows with the model's program (`model.resize_token_embeddings"
            hint += f"({ids})` of transformers), or remove the surplus tokens from its files"
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` has {ids} ids; the model in `{state.path}` has {rows}",
            why="an id beyond the rows of the embedding cannot be used",
            hint=hint,
        )
    if choice != NO_CHOICE and state.vocab_size is not None and ids < state.vocab_size:
        logger.warning(
            "tokenizer `%s` has %d ids, and the model in `%s` has %d tokens: if it is not the one "
            "that the model was trained with, its texts and scores mean nothing%s",
            *(tokenizer.name, ids, state.path, state.vocab_size),
            _missing_sentinels(state, tokenizer, state.vocab_size - ids),
        )
    return tokenizer


def has_own(checkpoint: Path, manifest: Manifest) -> bool:
    """Return True if a run has a copy of its tokenizer, or a tokenizer without files.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
    """
    has_copy = (checkpoint.resolve().parent.parent / _DIRECTORY).is_dir()
    return has_copy or "tokenizer" in manifest.meta


def _missing_sentinels(state: ModelState, tokenizer: Tokenizer, missing: int) -> str:
    """Return the option that adds the missing ids, if they may be sentinels; else nothing."""
    options = BUILT_IN_TYPES.get(tokenizer.name)
    if options is None or "vocab_extra_ids" not in options.takes:
        return ""
    if not answers_prompts(state.shape) or special_ids(tokenizer).sentinels:
        return ""
    return f"; `--vocab-extra-ids {missing}` adds the sentinels that it lacks"


def _of_recorded_type(
    state: ModelState,
    choice: TokenizerSettings,
    recorded: str,
    extra: Mapping[str, TokenizerFactory],
) -> TokenizerSettings:
    """Return the chosen tokenizer, by default of the type that the checkpoint names.

    Raises:
        ConfigError: Its type cannot be the checkpoint's.
    """
    given = choice.tokenizer_type
    if given is None:
        if recorded not in tokenizer_types(extra):
            return choice
        choice = dataclasses.replace(choice, tokenizer_type=recorded)
    elif not may_be_same(recorded, given):
        raise _not_recorded(state, f"`{given}`", f"`{recorded}`")
    _require_files(choice, recorded)
    return choice


def _require_files(choice: TokenizerSettings, recorded: str) -> None:
    """Raise an error if a chosen tokenizer lacks an option that its type needs.

    Args:
        choice: Chosen tokenizer, with its type.
        recorded: Type that the checkpoint names.

    Raises:
        ConfigError: An option is missing; the hint names no type that the checkpoint rules out.
    """
    kind = str(choice.tokenizer_type)
    options = BUILT_IN_TYPES.get(kind)
    if options is None or not (missing := choice.missing(options)):
        return
    hint = options.hint
    if choice.tokenizer_name_or_path is not None and may_be_same(recorded, _PRETRAINED):
        hint = f"{hint}, or add `--tokenizer-type {_PRETRAINED}` for a `tokenizer.json`"
    why = f"the checkpoint names `{recorded}`"
    raise ConfigError(f"`{kind}` needs {' and '.join(missing)}", why=why, hint=hint)


def _require_recorded(state: ModelState, tokenizer: Tokenizer) -> None:
    """Raise an error if a chosen tokenizer is not the recorded one, if one is recorded."""
    if state.tokenizer is None:
        return
    own = tokenizer_from(state.tokenizer)
    if own.fingerprint() != tokenizer.fingerprint() and not same_tokens(own, tokenizer):
        given, recorded = (
            f"`{one.name}` of {counted(one.vocab_size, 'id')}" for one in (tokenizer, own)
        )
        difference = token_difference(
            own, tokenizer, ("the checkpoint's", "the given tokenizer"), sizes=False
        )
        if difference is not None:
            recorded += f": {difference}"
        raise _not_recorded(state, given, recorded)


def _not_recorded(state: ModelState, given: str, recorded: str) -> ConfigError:
    hint = "give the tokenizer that the model was trained with"
    if state.tokenizer is not None:
        hint += ", or leave the option out"
    elif state.tokenizer_type in BUILT_IN_TYPES:
        flags = example_flags(state.tokenizer_type, sentinels=answers_prompts(state.shape))
        hint += f": `{flags}`"
    return ConfigError(
        f"tokenizer {given} is not the tokenizer of `{state.path}`",
        why=f"the checkpoint names {recorded}",
        hint=hint,
    )


def no_tokenizer(path: Path, recorded: str | None, *, sentinels: bool = False) -> ConfigError:
    """Return the error for a checkpoint without a tokenizer, if none was chosen.

    Args:
        path: Path of the checkpoint.
        recorded: Type of the tokenizer that the checkpoint names; None if it names none.
        sentinels: True if the model needs a tokenizer with sentinels.
    """
    more = ", `--vocab-extra-ids N` for its sentinels" if sentinels else ""
    named = "`--tokenizer-type`" if recorded is None else f"`--tokenizer-type {recorded}`"
    return ConfigError(
        f"`{path}` has no tokenizer",
        why=None if recorded is None else f"it has only the name of its type, `{recorded}`",
        hint=f"name the tokenizer that the model was trained with by {named} and its files{more}",
    )


def find_tokenizer(
    checkpoint: Path,
    manifest: Manifest,
    choice: TokenizerSettings,
    extra: Mapping[str, TokenizerFactory],
) -> Tokenizer:
    """Return the tokenizer of a run: the chosen one, the run's copy, or a type without files.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        choice: Tokenizer chosen by the user.
        extra: Tokenizer types that plugins registered.

    Raises:
        ConfigError: It is not the tokenizer of the run, or its options are wrong.
        DataError: No tokenizer was saved, or its files are invalid.
    """
    trained = manifest.meta.get("tokenizer")
    described = trained.get("describe") if isinstance(trained, Mapping) else None
    kind = described.get("type") if isinstance(described, Mapping) else None
    directory = checkpoint.resolve().parent.parent / _DIRECTORY
    if choice != NO_CHOICE:
        tokenizer = _chosen(choice, kind, extra)
    elif not directory.is_dir() and isinstance(described, Mapping) and _fileless(described):
        tokenizer = tokenizer_from(TokenizerSettings.described(described), extra=extra)
    else:
        tokenizer = load_tokenizer(directory, extra=extra)
    fingerprint = trained.get("fingerprint") if isinstance(trained, Mapping) else None
    differs = fingerprint is not None and tokenizer.fingerprint() != fingerprint
    if differs and not _has_tokens_of(directory, tokenizer, extra):
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` is not the tokenizer of `{checkpoint}`",
            why=f"its fingerprint is {tokenizer.fingerprint()[:16]}; the run's `{kind}` has "
            f"{str(fingerprint)[:16]}",
            hint="give the files that the data was prepared with",
        )
    return tokenizer


def _has_tokens_of(
    directory: Path, tokenizer: Tokenizer, extra: Mapping[str, TokenizerFactory]
) -> bool:
    """Return True if the run's copy, of another type, has the same token for each id."""
    try:
        return same_tokens(load_tokenizer(directory, extra=extra), tokenizer)
    except LmcoreError:  # there is none
        return False


def _chosen(
    choice: TokenizerSettings, kind: object, extra: Mapping[str, TokenizerFactory]
) -> Tokenizer:
    named = choice.tokenizer_type or (kind if isinstance(kind, str) else None)
    if named is None:
        raise ConfigError(
            "the checkpoint does not record its tokenizer",
            hint="add `--tokenizer-type TYPE`",
        )
    choice = dataclasses.replace(choice, tokenizer_type=named)
    if isinstance(kind, str):
        _require_files(choice, kind)
    return tokenizer_from(choice, extra=extra)


def _fileless(described: Mapping[str, Any]) -> bool:
    size = described.get("vocab_size")
    plain = size is None or (isinstance(size, int) and not isinstance(size, bool))
    return (
        set(described) <= {"type", "vocab_size"}
        and isinstance(described.get("type"), str)
        and plain
    )
