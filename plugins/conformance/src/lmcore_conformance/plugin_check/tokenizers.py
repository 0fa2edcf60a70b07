"""Use of a plugin's tokenizer, if its factory needs no files.

Part of `lmcore plugin check`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

from lmcore.base.errors import DataError, LmcoreError, counted
from lmcore.contract.probe import Check, CheckStatus
from lmcore.contract.tokenizer import Tokenizer, TokenizerFactory
from lmcore.plugin.record import located

__all__ = ["check_tokenizer"]

_TEXTS = (
    "To be, or not to be: 12 + 30 = 42.\n",
    "na\u00efve \u4f60\u597d \U0001f642",
    "\ufb01 \uff21 \u00bd",  # what Unicode's normal form KC replaces by other letters
    "  two spaces",
    "two\r\nlines",
    "",
    " ",
)
_SPELLINGS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>")
"""Usual spellings of the token that ends a document."""


def check_tokenizer(hook: str, name: str, factory: TokenizerFactory) -> Iterator[Check]:
    """Yield what is wrong with the tokenizers that a factory builds.

    Args:
        hook: Name of the hook.
        name: Name that it is registered by.
        factory: The factory.
    """
    try:
        built: Any = factory(vocab_file=None, merge_file=None, vocab_size=None)
    except LmcoreError as error:
        yield Check(hook, CheckStatus.SKIPPED, f"`{name}` was not built: {error.what}")
        return
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        detail = f"`{name}` without options raised {located(error)}, no `ConfigError`"
        yield Check(hook, CheckStatus.FAILED, detail)
        return
    if not isinstance(built, Tokenizer):
        detail = f"the factory of `{name}` returned `{type(built).__name__}`, no `Tokenizer`"
        yield Check(hook, CheckStatus.FAILED, detail)
        return
    try:
        faults = list(_faults(name, built))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        faults = [f"it raised {located(error)}"]
    yield from (Check(hook, CheckStatus.FAILED, f"`{name}`: {fault}") for fault in faults)
    if faults:
        return
    lossless, texts = True, _encodable(built)
    for text in texts:
        back = built.decode(built.encode(text))
        if back != text:
            lossless = False
            detail = f"`{name}` loses something: {text!r} is {back!r:.80} after `decode`"
            yield Check(hook, CheckStatus.WARNING, detail)
    if lossless:
        refused = f", and refuses {len(_TEXTS) - len(texts)}" if len(texts) < len(_TEXTS) else ""
        detail = f"`{name}` encodes and decodes {counted(len(texts), 'text')}{refused}"
        yield Check(hook, CheckStatus.OK, detail)


def _encodable(tokenizer: Tokenizer) -> list[str]:
    """Return the texts that a tokenizer takes; all, if it claims `encodes_any_text`."""
    texts = []
    for text in _TEXTS:
        try:
            tokenizer.encode(text)
        except DataError:
            if tokenizer.encodes_any_text:
                raise
            continue
        texts.append(text)
    return texts


def _faults(name: str, tokenizer: Tokenizer) -> Iterator[str]:
    if tokenizer.name != name:
        yield f"its `name` is `{tokenizer.name}`"
    described = tokenizer.describe()
    if json.loads(json.dumps(described)) != described:
        yield f"`describe` gives no JSON values: {described!r:.80}"
    size = tokenizer.vocab_size
    if tokenizer.eod is not None and not 0 <= tokenizer.eod < size:
        yield f"its `eod` {tokenizer.eod} is not below its `vocab_size` {size}"
    copy = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 - made here
    texts = _encodable(tokenizer)
    batch = tokenizer.encode_batch(texts)
    for text, row in zip(texts, batch, strict=True):
        ids = tokenizer.encode(text)
        outside = [one for one in ids if not 0 <= one < size]
        if outside:
            yield f"`encode` of {text!r} gives {outside[0]}, not below its `vocab_size` {size}"
            return
        for how, found in (
            ("a second time", tokenizer.encode(text)),
            ("by `encode_batch`", row.tolist()),
            ("after `pickle`", copy.encode(text)),
        ):
            if list(found) != list(ids):
                yield f"{text!r} has other ids {how}: {found!r:.60}, not {ids!r:.60}"
                return
        if not isinstance(tokenizer.decode(ids), str):
            yield f"`decode` returned `{type(tokenizer.decode(ids)).__name__}`"
            return
    yield from _special_faults(tokenizer)


def _special_faults(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text, if any, that is encoded as the end of a document."""
    eod = tokenizer.eod
    if eod is None:
        return
    for text in dict.fromkeys((tokenizer.decode([eod]), *_SPELLINGS)):
        try:
            ids = tokenizer.encode(text)
        except DataError:  # a type may refuse a text
            continue
        if eod in ids:
            yield (
                f"`encode` of {text!r} gives its `eod` {eod}: text that spells a special token is "
                "ordinary text"
            )
            return
