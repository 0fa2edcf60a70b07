"""Files of a pretrained tokenizer: `tokenizer.json` and its configuration beside it.

`tokenizer.json` has the vocabulary and the pipeline.  `tokenizer_config.json` (or the older
`special_tokens_map.json`) names the tokens that begin, end, pad or mask a text.  Code in the
directory is never run, and nothing is downloaded.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lmcore.base.errors import DataError
from lmcore.base.missing_path import missing_path_hint
from lmcore.data.tokenizer.file_tokenizer import read_bounded

__all__ = [
    "ADDITIONAL_TEMPLATES",
    "CONFIG",
    "GENERATION_CONFIG",
    "MAX_CONFIG_BYTES",
    "MODEL_CONFIG",
    "TEMPLATE",
    "AddedSpelling",
    "PretrainedFiles",
    "read_pretrained",
]

_PIPELINE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
_MAX_PIPELINE_BYTES = 512 * 1024 * 1024
MAX_CONFIG_BYTES = 32 * 1024 * 1024
_MAX_TEMPLATES = 64
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_DECODER = "added_tokens_decoder"
_OPTIONS = ("add_prefix_space", "do_lower_case", "strip_accents", "tokenize_chinese_chars")
_GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# A file of each other layout, and the tokenizer type that reads it.
_OTHER_LAYOUTS = {
    "merges.txt": "`--tokenizer-type GPT2BPETokenizer` reads its `vocab.json` and `merges.txt`",
    "vocab.txt": "`--tokenizer-type BertWordPieceLowerCase` reads its `vocab.txt`",
    "spiece.model": "`--tokenizer-type SentencePieceTokenizer` reads its `spiece.model`",
    "tokenizer.model": "`--tokenizer-type Llama2Tokenizer` reads its `tokenizer.model`",
}


@dataclass(frozen=True)
class AddedSpelling:
    """Token that the configuration adds, with the options for matching it in text."""

    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class PretrainedFiles:
    """Contents of the files of a pretrained tokenizer.

    Attributes:
        paths: the files that were read, `tokenizer.json` first; last those for chats, which are not
            read here, and are copied with the others.
        pipeline: text of `tokenizer.json`.
        roles: spelling of the token for each of bos, eos, unk, sep, pad, cls, mask.
        added: tokens that the configuration adds, in order of their ids.
        add_bos: texts begin with bos; None: the pipeline decides.
        add_eos: texts end with eos; None: the pipeline decides.
        numbered: tokens in `added` with an id and all options, which replace the pipeline's.
        options: options of the pipeline that the configuration sets, by their names there.
    """

    paths: tuple[Path, ...]
    pipeline: str
    roles: dict[str, str] = field(default_factory=dict)
    added: tuple[AddedSpelling, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    numbered: frozenset[str] = frozenset()
    options: dict[str, bool] = field(default_factory=dict)


def read_pretrained(path: str, *, flag: str) -> PretrainedFiles:
    """Read a directory, or a `tokenizer.json` and the configuration beside it.

    A file with another name is read alone.

    Args:
        path: directory or file.
        flag: option that named it, for messages.

    Raises:
        DataError: missing, too large, not JSON, or of another layout.
    """
    pipeline = _pipeline_path(Path(path), flag)
    content = read_bounded(str(pipeline), _MAX_PIPELINE_BYTES, flag=flag)
    paths, settings = [pipeline], {}
    if pipeline.name == _PIPELINE:
        for name in (_MAP, CONFIG):  # the newer one overrides
            beside = pipeline.with_name(name)
            if beside.is_file():
                paths.append(beside)
                settings.update({k: v for k, v in _object(beside, flag).items() if v is not None})
    source = str(paths[-1])
    if pipeline.name == _PIPELINE:
        paths += _chat_files(pipeline.parent)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise DataError(f"`{pipeline}` is not UTF-8", hint=f"check `{flag}`") from None
    return PretrainedFiles(
        paths=tuple(paths),
        pipeline=text,
        roles={
            role: _spelling(settings[key], key, source).content
            for role in _ROLES
            if (key := f"{role}_token") in settings
        },
        added=_added(settings, source),
        add_bos=_switch(settings, "add_bos_token", source),
        add_eos=_switch(settings, "add_eos_token", source),
        numbered=frozenset(
            one["content"]
            for one in _numbered(settings, source)
            if isinstance(one, dict) and all(option.name in one for option in fields(AddedSpelling))
        ),
        options=_options(settings, source),
    )


def _options(settings: dict[str, Any], source: str) -> dict[str, bool]:
    """Return the options of the pipeline; the general classes of transformers have none.

    Without a class, transformers takes the one of the model.
    """
    if settings.get("tokenizer_class") in _GENERAL_CLASSES:
        return {}
    found = {name: _switch(settings, name, source) for name in _OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def _chat_files(directory: Path) -> list[Path]:
    """Return the files for chats: templates, and the tokens that end a generated text."""
    more = sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    if len(more) > _MAX_TEMPLATES:
        raise DataError(
            f"`{directory / ADDITIONAL_TEMPLATES}` has {len(more)} files",
            why=f"at most {_MAX_TEMPLATES} templates are kept",
        )
    ends = directory / GENERATION_CONFIG
    if not ends.is_file():  # as in transformers the model's configuration stands in for it
        ends = directory / MODEL_CONFIG
    names = [ends, *more, directory / TEMPLATE]
    found = [path for path in names if path.is_file()]
    for path in found:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise DataError(f"`{path}` is larger than {MAX_CONFIG_BYTES:,} bytes")
    return found


def _hub_name(path: Path) -> str:
    """Return a path that may be a name of a hub, `t5-small` or `owner/name`; else `NAME`."""
    is_name = not path.is_absolute() and len(path.parts) <= 2 and ".." not in path.parts
    return shlex.quote(str(path)) if is_name else "NAME"


def _pipeline_path(path: Path, flag: str) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(
            f"`{flag} {path}`: no such directory",
            why="a tokenizer is read from disk; nothing is downloaded",
            hint=missing_path_hint(
                path,
                "download it first, for example with "
                f"`hf download {_hub_name(path)} --local-dir DIRECTORY`",
            ),
        )
    pipeline = path / _PIPELINE
    if not pipeline.is_file():
        hints = [hint for name, hint in _OTHER_LAYOUTS.items() if (path / name).is_file()]
        raise DataError(
            f"`{path}` has no `{_PIPELINE}`",
            why="older layouts without it are not supported",
            hint=hints[0] if hints else f"check `{flag}`",
        )
    return pipeline


def _object(path: Path, flag: str) -> dict[str, Any]:
    content = read_bounded(str(path), MAX_CONFIG_BYTES, flag=flag)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    if not isinstance(values, dict):
        raise DataError(f"`{path}` is not a JSON object")
    return values


def _spelling(value: object, key: str, source: str) -> AddedSpelling:
    """Return a token given as its spelling or as an object with `content`."""
    if isinstance(value, str):
        value = {"content": value}
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        content: str = value["content"]
        return AddedSpelling(
            content,
            special=value.get("special") is not False,
            single_word=value.get("single_word") is True,
            lstrip=value.get("lstrip") is True,
            rstrip=value.get("rstrip") is True,
            normalized=value.get("normalized") is True,
        )
    raise DataError(
        f"`{source}`: `{key}` is not a token",
        why="a token is a string, or an object with a string under `content`",
    )


def _numbered(settings: dict[str, Any], source: str) -> list[object]:
    """Return the tokens with ids, in order of id."""
    numbered = settings.get(_DECODER, {})
    if not isinstance(numbered, dict) or not all(i.isdecimal() and len(i) < 12 for i in numbered):
        raise DataError(f"`{source}`: `{_DECODER}` is not an object of ids and tokens")
    return [numbered[i] for i in sorted(numbered, key=int)]


def _added(settings: dict[str, Any], source: str) -> tuple[AddedSpelling, ...]:
    """Return the tokens with ids, in order of id, then the special tokens without."""
    found = [_spelling(value, _DECODER, source) for value in _numbered(settings, source)]
    roles = [f"{role}_token" for role in _ROLES]
    found += [_spelling(settings[key], key, source) for key in roles if key in settings]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key, [])
        values = list(more.values()) if isinstance(more, dict) else more
        if not isinstance(values, list):
            raise DataError(f"`{source}`: `{key}` is not a list of tokens")
        found += [_spelling(value, key, source) for value in values]
    first: dict[str, AddedSpelling] = {}
    for token in found:
        first.setdefault(token.content, token)
    return tuple(first.values())


def _switch(settings: dict[str, Any], key: str, source: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"`{source}`: `{key}` is neither true nor false")
    return value
