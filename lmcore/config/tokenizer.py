"""Tokenizer settings: one object from the command line to the worker process.

The sections of `lmcore train`, `data prepare` and `generate` have its fields as options; the
metadata of a dataset and the record in a run directory have them as keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from lmcore.base.errors import ConfigError
from lmcore.config.option import flag_of

__all__ = [
    "BUILT_IN_TYPES",
    "COPIED_FILES",
    "TokenizerIdentity",
    "TokenizerSettings",
    "TypeOptions",
    "example_flags",
]

Value = str | int | None


@dataclass(frozen=True)
class TokenizerSettings:
    """Type and options of a tokenizer; None, 0 and False mean not given.

    Attributes:
        tokenizer_type: name of a built-in type or of a plugin's.
        vocab_file: path of `vocab.json` or `vocab.txt`.
        merge_file: path of `merges.txt`.
        vocab_size: V of `NullTokenizer`.
        tokenizer_model: path of a SentencePiece model; for pretrained types, as the next one.
        tokenizer_name_or_path: directory of a pretrained tokenizer, or its `tokenizer.json`.
        vocab_extra_ids: number of sentinel tokens added at the end of the vocabulary.
        add_special_tokens: add the special tokens that the tokenizer puts around a text, or that
            WordPiece puts after its vocabulary; None: as Megatron does for the type.
        parse_special_tokens: encode text that spells a special token as that token.
    """

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tokenizer_model: str | None = None
    tokenizer_name_or_path: str | None = None
    vocab_extra_ids: int = 0
    add_special_tokens: bool | None = None
    parse_special_tokens: bool = False

    @classmethod
    def of(cls, section: object) -> TokenizerSettings:
        """Build the settings from the options of the same names in a section."""
        return cls(**{field.name: getattr(section, field.name) for field in _FIELDS})

    @classmethod
    def without_model(cls, section: object) -> TokenizerSettings:
        """Build the settings for a command without a model whose vocabulary could be padded.

        Raises:
            ConfigError: `vocab_size` was given for a built-in type that does not take it.
        """
        settings = cls.of(section)
        options = BUILT_IN_TYPES.get(settings.tokenizer_type or "")
        if options is not None and settings.vocab_size is not None:
            problem = settings.unwanted(options, padded=False)
            if problem is not None:
                raise problem
        return settings

    @classmethod
    def described(cls, description: Mapping[str, object]) -> TokenizerSettings:
        """Return the settings of a description by `describe`; other keys are ignored.

        Raises:
            ConfigError: a value of the wrong type.
        """
        values: dict[str, object] = {}
        for key, value in description.items():
            name = "tokenizer_type" if key == "type" else key
            if name not in _KINDS or value is None:
                continue
            if not _fits(value, _KINDS[name]):
                raise ConfigError(f"tokenizer setting `{key}: {value}` has the wrong type")
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]  # the types were checked above

    def describe(self) -> dict[str, Value]:
        """Return the given settings by name, the type under `type`."""
        given: dict[str, Value] = {"type": self.tokenizer_type}
        for field in _FIELDS[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                given[field.name] = value
        return given

    def given(self) -> dict[str, str]:
        """Return the given flags by setting, as typed, without the type."""
        flags = {}
        for name, value in list(self.describe().items())[1:]:
            flag = flag_of(name)
            if isinstance(value, bool):
                flags[name] = flag if value else f"--no-{flag[2:]}"
            else:
                flags[name] = f"{flag} {value}"
        return flags

    def missing(self, options: TypeOptions) -> list[str]:
        """Return the required flags that were not given; of alternatives, one is enough."""
        return [
            " or ".join(f"`{flag_of(name)}`" for name in names)
            for names in options.needs
            if all(getattr(self, name) is None for name in names)
        ]

    def unwanted(self, options: TypeOptions, *, padded: bool = True) -> ConfigError | None:
        """Return the error if an option was given that the type does not take, else None.

        Args:
            options: options of the type.
            padded: allow `vocab_size` for any type, as the size that a model is padded to.
        """
        for name, typed in self.given().items():
            if not (padded and name == "vocab_size") and name not in options.allowed:
                taken = ", ".join(f"`{flag_of(option)}`" for option in options.allowed)
                return ConfigError(
                    f"`{typed}` cannot be combined with the tokenizer type `{self.tokenizer_type}`",
                    why=f"it takes {taken}" if taken else "it takes no options",
                    hint=f"leave `{flag_of(name)}` out, or choose another type",
                )
        return None


class _Tokenizer(Protocol):
    """The part of `lmcore.contract.Tokenizer` that an identity records."""

    vocab_size: int
    eod: int | None

    def describe(self) -> Mapping[str, Value]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class TokenizerIdentity:
    """A tokenizer as a run or a dataset records it.

    Attributes:
        vocab_size: Number of real ids, before padding.
        eod: End-of-document id; None if the vocabulary has none.
        fingerprint: Digest, equal for equal tokenizers wherever their files are.
        description: Type and options that build it again, as `Tokenizer.describe` returns them.
    """

    vocab_size: int
    eod: int | None = None
    fingerprint: str = ""
    description: Mapping[str, Value] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: _Tokenizer) -> TokenizerIdentity:
        """Return the identity of a tokenizer."""
        description, fingerprint = tokenizer.describe(), tokenizer.fingerprint()
        return cls(tokenizer.vocab_size, tokenizer.eod, fingerprint, description)

    @property
    def type(self) -> str:
        """The value of `--tokenizer-type` that names the type."""
        return str(self.description["type"])


@dataclass(frozen=True)
class TypeOptions:
    """Options of a tokenizer type.

    Attributes:
        needs: required options; of each group of alternatives, one.
        takes: other options.
        hint: hint of the message for a missing option.
        alternative: end of the hint for who may choose another type; None without one.
    """

    needs: tuple[tuple[str, ...], ...] = ()
    takes: tuple[str, ...] = ()
    hint: str | None = None
    alternative: str | None = None

    @property
    def allowed(self) -> tuple[str, ...]:
        """All options that the type takes."""
        return (*(name for names in self.needs for name in names), *self.takes)

    @property
    def open_hint(self) -> str | None:
        """The hint where no checkpoint records the type, so that another may be chosen."""
        return ", ".join(part for part in (self.hint, self.alternative) if part) or None


_WORDPIECE = TypeOptions(
    needs=(("vocab_file",),),
    takes=("vocab_extra_ids", "add_special_tokens"),
    hint="give the `vocab.txt` of the tokenizer; `lmcore data train-tokenizer` creates one",
)
_MODEL_HINT = "give a SentencePiece `.model` file; `lmcore data train-tokenizer` creates one"
_PRETRAINED = TypeOptions(
    needs=(("tokenizer_name_or_path", "tokenizer_model"),),
    takes=("vocab_extra_ids", "add_special_tokens", "parse_special_tokens"),
    hint="give a directory with a `tokenizer.json`",
)

BUILT_IN_TYPES: Mapping[str, TypeOptions] = MappingProxyType(
    {
        "BertWordPieceCase": _WORDPIECE,
        "BertWordPieceLowerCase": _WORDPIECE,
        "ByteTokenizer": TypeOptions(),
        "GPT2BPETokenizer": TypeOptions(
            needs=(("vocab_file",), ("merge_file",)),
            hint="give the tokenizer's `vocab.json` and `merges.txt` (GPT-2's are on "
            "https://huggingface.co/openai-community/gpt2)",
            alternative="or use `--tokenizer-type ByteTokenizer`, which needs no files",
        ),
        "GPTSentencePieceTokenizer": TypeOptions(needs=(("tokenizer_model",),), hint=_MODEL_HINT),
        "HFTokenizer": _PRETRAINED,
        "HuggingFaceTokenizer": _PRETRAINED,
        "Llama2Tokenizer": TypeOptions(
            needs=(("tokenizer_model",),), takes=("add_special_tokens",), hint=_MODEL_HINT
        ),
        "NullTokenizer": TypeOptions(needs=(("vocab_size",),), hint="add `--vocab-size N`"),
        "PretrainedFromHF": _PRETRAINED,
        "SentencePieceTokenizer": TypeOptions(
            needs=(("tokenizer_model",),),
            takes=("vocab_extra_ids", "parse_special_tokens"),
            hint=_MODEL_HINT,
        ),
    }
)
"""Built-in tokenizer types, by name."""

COPIED_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_file": ("vocab.json", "vocab.txt"),
        "merge_file": ("merges.txt",),
        "tokenizer_model": ("tokenizer.model",),
        "tokenizer_name_or_path": ("pretrained",),
    }
)
"""Names of files and directories in a run's copy of its tokenizer, by option."""

_VALUES = {"vocab_size": "N", "vocab_extra_ids": "N", "tokenizer_name_or_path": "PATH"}
"""Placeholders of options in `example_flags` that do not name a file."""


def example_flags(tokenizer_type: str | None, *, sentinels: bool = False) -> str:
    """Return the flags of a tokenizer with the options that its type needs, for a printed command.

    Args:
        tokenizer_type: name of the type; None, or one that is not built in: any type.
        sentinels: with the option for sentinels, which T5 needs, if the type takes it.
    """
    options = BUILT_IN_TYPES.get(tokenizer_type or "")
    if options is None:
        return "--tokenizer-type TYPE"
    needed = [names[0] for names in options.needs]
    if sentinels and "vocab_extra_ids" in options.takes:
        needed.append("vocab_extra_ids")
    files = (f"{flag_of(name)} {_VALUES.get(name, 'FILE')}" for name in needed)
    return " ".join([f"--tokenizer-type {tokenizer_type}", *files])


_FIELDS = dataclasses.fields(TokenizerSettings)
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("tokenizer_type", "vocab_file", "merge_file"), str),
    "vocab_size": int,
    **dict.fromkeys(("tokenizer_model", "tokenizer_name_or_path"), str),
    "vocab_extra_ids": int,
    **dict.fromkeys(("add_special_tokens", "parse_special_tokens"), bool),
}


def _fits(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
