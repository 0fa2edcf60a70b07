"""Chat templates and end tokens of a tokenizer, from the files that are kept with it.

Only pretrained tokenizers have such files: `tokenizer_config.json`, `chat_template.jinja`, the
directory `additional_chat_templates`, and `generation_config.json`, or without it the model's
`config.json`.  None of them has an influence on ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcore.base.errors import DataError
from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer.file_tokenizer import read_bounded
from lmcore.data.tokenizer.pretrained.files import (
    ADDITIONAL_TEMPLATES,
    CONFIG,
    GENERATION_CONFIG,
    MAX_CONFIG_BYTES,
    MODEL_CONFIG,
    TEMPLATE,
)
from lmcore.data.tokenizer.pretrained.pretrained_tokenizer import PretrainedTokenizer

__all__ = ["DEFAULT_TEMPLATE", "chat_templates", "end_tokens"]

DEFAULT_TEMPLATE = "default"
_FLAG = "--tokenizer-name-or-path"


def chat_templates(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name; empty if it has none.

    A single template has the name `default`.  If there is a `chat_template.jinja` or a file in
    `additional_chat_templates`, `tokenizer_config.json` is not asked, as in transformers.

    Args:
        tokenizer: Any tokenizer.

    Raises:
        DataError: A file is damaged or too large.
    """
    own: dict[str, str] = {}
    for path in _files(tokenizer):
        if path.name == TEMPLATE:
            own[DEFAULT_TEMPLATE] = _text(path)
        elif path.parent.name == ADDITIONAL_TEMPLATES:
            own[path.stem] = _text(path)
    config = next((path for path in _files(tokenizer) if path.name == CONFIG), None)
    if own or config is None:
        return own
    return _configured(_object(config).get("chat_template"), config)


def end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a generated text.

    They are the tokenizer's end of a document, and `eos_token_id` of `generation_config.json`: one
    id or several, such as the end of a turn.  Without that file, the special and added tokens in
    `eos_token_id` of the model's `config.json` are taken: that may be a default, which is any id.

    Args:
        tokenizer: Any tokenizer.

    Raises:
        DataError: The file is damaged, or names an id outside the vocabulary.
    """
    found = set() if tokenizer.eod is None else {tokenizer.eod}
    for path in _files(tokenizer):
        if path.name == MODEL_CONFIG and isinstance(tokenizer, PretrainedTokenizer):
            value = _object(path).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            found |= tokenizer.added_ids & {one for one in ids if type(one) is int}
        elif path.name == GENERATION_CONFIG:
            value = _object(path).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            for one in ids:
                if type(one) is not int or not 0 <= one < tokenizer.vocab_size:
                    raise DataError(
                        f"`{path}`: `eos_token_id` is {json.dumps(value)[:200]}",
                        why=f"an id is a number from 0 to {tokenizer.vocab_size - 1}",
                    )
            found |= set(ids)
    return frozenset(found)


def _files(tokenizer: Tokenizer) -> list[Path]:
    if not isinstance(tokenizer, PretrainedTokenizer):
        return []
    return list(map(Path, tokenizer.files()[1:]))


def _configured(value: object, path: Path) -> dict[str, str]:
    """Return the templates of `tokenizer_config.json`: one text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    templates: dict[str, str] = {}
    for one in value if isinstance(value, list) else [None]:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise DataError(
                f"`{path}`: `chat_template` is no template",
                why="it is a text, or a list of objects with `name` and `template`",
            )
        templates[name] = text
    return templates


def _text(path: Path) -> str:
    try:
        return read_bounded(str(path), MAX_CONFIG_BYTES, flag=_FLAG, may_be_empty=True).decode()
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not UTF-8") from None


def _object(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(read_bounded(str(path), MAX_CONFIG_BYTES, flag=_FLAG))
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    if not isinstance(values, dict):
        raise DataError(f"`{path}` is not a JSON object")
    return values
