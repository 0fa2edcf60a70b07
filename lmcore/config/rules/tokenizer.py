"""Rules for the tokenizer's type, its options and its files."""

from __future__ import annotations

from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings

__all__ = ["TOKENIZER_RULES"]


def _type(loaded: LoadedConfig) -> Problems:
    settings = TokenizerSettings.of(loaded.config.data)
    given = [name for name in settings.given() if name != "vocab_size"]
    if settings.tokenizer_type is None:
        yield from _without_type(loaded, given)
        return
    options = BUILT_IN_TYPES.get(settings.tokenizer_type)
    if options is None:  # a plugin's
        return
    if missing := " and ".join(settings.missing(options)):
        yield ConfigError(
            f"{loaded.shown('tokenizer_type')} needs {missing}", hint=options.open_hint
        )
    allowed = " ".join(f"`{flag_of(name)}`" for name in options.allowed)
    for name in given:
        if name not in options.allowed:
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with {loaded.shown('tokenizer_type')}",
                why=f"it takes {allowed}" if allowed else "it takes no options",
                hint=f"{loaded.removal(name)}, or choose another type",
            )


def _without_type(loaded: LoadedConfig, given: list[str]) -> Problems:
    """Refuse options of a tokenizer without its type, which only both files of BPE imply."""
    for name in given:
        other = {"vocab_file": "merge_file", "merge_file": "vocab_file"}.get(name)
        needed = flag_of(other or "tokenizer_type")
        hint = f"add `{needed} {'FILE' if other else 'TYPE'}`"
        if other == "merge_file":
            hint += ", or the `--tokenizer-type` that takes a vocabulary alone"
        yield ConfigError(
            f"{loaded.shown(name)} needs `{needed}`",
            why="byte-pair encoding takes a vocabulary and its merges"
            if other
            else "several types of tokenizers take it",
            hint=hint,
        )


def _files(loaded: LoadedConfig) -> Problems:
    data = loaded.config.data
    for name, path in (("vocab_file", data.vocab_file), ("merge_file", data.merge_file)):
        if path is not None and not Path(path).exists():
            yield ConfigError(f"{loaded.shown(name)}: no such file", hint="check the path")
    paths = {
        "tokenizer_model": data.tokenizer_model,
        "tokenizer_name_or_path": data.tokenizer_name_or_path,
    }
    for name, path in paths.items():
        if path is not None and not Path(path).exists():
            yield ConfigError(
                f"{loaded.shown(name)}: no such file or directory",
                why="a tokenizer is read from local files; nothing is downloaded",
                hint="check the path",
            )


TOKENIZER_RULES: tuple[Rule, ...] = (_type, _files)
