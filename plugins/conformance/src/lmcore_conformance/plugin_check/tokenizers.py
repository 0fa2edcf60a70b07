"""Use of a plugin's tokenizer, if its factory needs no files.

Part of `lmcore plugin check`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lmcore.base.errors import DataError, LmcoreError, counted
from lmcore.contract.probe import Check, CheckStatus
from lmcore.contract.tokenizer import Tokenizer, TokenizerFactory
from lmcore.plugin.record import located

__all__ = ["check_tokenizers"]

_TEXTS = (
    "To be, or not to be: 12 + 30 = 42.\n",
    "na\u00efve \u4f60\u597d \U0001f642",
    "\ufb01 \uff21 \u00bd",  # what Unicode's normal form KC replaces by other letters
    "  two spaces",
    "two\r\nlines",
    "",
    " ",
)
_SURROGATE = "a\ud800b"
"""Text that has no UTF-8."""

_SPELLINGS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>")
"""Usual spellings of the token that ends a document."""


def check_tokenizers(hook: str, factories: Mapping[str, TokenizerFactory]) -> Iterator[Check]:
    """Yield what is wrong with the tokenizers that a plugin's factories build.

    Args:
        hook: Name of the hook.
        factories: The factories, by the names that they are registered by.
    """
    found: dict[str, list[Check]] = {}
    right: dict[str, Tokenizer] = {}
    for name, factory in factories.items():
        built = _built(hook, name, factory)
        if isinstance(built, Check):
            found[name] = [built]
            continue
        try:
            faults = list(_faults(name, built))
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            faults = [f"it raised {located(error)}"]
        found[name] = [Check(hook, CheckStatus.FAILED, f"`{name}`: {fault}") for fault in faults]
        if not faults:
            right[name] = built
    elsewhere = _differ_elsewhere(right)
    for name in factories:
        yield from found[name]
        if name in elsewhere:
            yield Check(hook, CheckStatus.FAILED, f"`{name}`: {elsewhere[name]}")
        elif name in right:
            yield from _losses(hook, name, right[name])


def _built(hook: str, name: str, factory: TokenizerFactory) -> Tokenizer | Check:
    """Return the tokenizer of a factory without options, or the line that says why there is none.

    A plugin's factory may return anything.
    """
    try:
        built: Any = factory(vocab_file=None, merge_file=None, vocab_size=None)
    except LmcoreError as error:
        return Check(hook, CheckStatus.SKIPPED, f"`{name}` was not built: {error.what}")
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        detail = f"`{name}` without options raised {located(error)}, no `ConfigError`"
        return Check(hook, CheckStatus.FAILED, detail)
    if not isinstance(built, Tokenizer):
        detail = f"the factory of `{name}` returned `{type(built).__name__}`, no `Tokenizer`"
        return Check(hook, CheckStatus.FAILED, detail)
    return built


def _losses(hook: str, name: str, tokenizer: Tokenizer) -> Iterator[Check]:
    """Yield the texts that are others after encoding and decoding, or a line that none is."""
    lossless, texts = True, _encodable(tokenizer)
    for text in texts:
        back = tokenizer.decode(tokenizer.encode(text))
        if back != text:
            lossless = False
            detail = f"`{name}` loses something: {text!r} is {back!r:.80} after `decode`"
            yield Check(hook, CheckStatus.WARNING, detail)
    if lossless:
        refused = f", and refuses {len(_TEXTS) - len(texts)}" if len(texts) < len(_TEXTS) else ""
        detail = f"`{name}` encodes and decodes {counted(len(texts), 'text')}{refused}"
        yield Check(hook, CheckStatus.OK, detail)


_ELSEWHERE = """
import json, pickle, sys
given = pickle.load(sys.stdin.buffer)
found = [[one.fingerprint(), [list(one.encode(text)) for text in texts]] for one, texts in given]
sys.__stdout__.write("\\n" + json.dumps(found, default=int))
"""
"""Program of another process: fingerprint and ids of each tokenizer that it gets."""

_ELSEWHERE_SECONDS = 60.0


def _differ_elsewhere(tokenizers: Mapping[str, Tokenizer]) -> dict[str, str]:
    """Return the tokenizers that answer otherwise in a process with other salts of `hash`."""
    if not tokenizers:
        return {}
    given = [(one, _encodable(one)) for one in tokenizers.values()]
    salt = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-c", _ELSEWHERE],
        input=pickle.dumps(given),
        capture_output=True,
        check=False,
        timeout=_ELSEWHERE_SECONDS,
        env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": paths},
    )
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return dict.fromkeys(tokenizers, f"in another process it raised {error:.200}")
    differing = {}
    answers = json.loads(done.stdout.decode().rpartition("\n")[2])
    for (name, one), (_, texts), (fingerprint, ids) in zip(
        tokenizers.items(), given, answers, strict=True
    ):
        if fingerprint != one.fingerprint():
            differing[name] = (
                f"`fingerprint` is {fingerprint!r:.20} in another process, not "
                f"{one.fingerprint()!r:.20}: does it use `hash`, which Python salts?"
            )
        elif ids != [list(one.encode(text)) for text in texts]:
            differing[name] = "`encode` gives other ids in another process"
    return differing


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
    batch: Any = tokenizer.encode_batch(texts)
    for text, row in zip(texts, batch, strict=True):
        ids = tokenizer.encode(text)
        if not isinstance(row, np.ndarray) or row.dtype != np.int32:
            kind = getattr(row, "dtype", type(row).__name__)
            yield f"`encode_batch` gives `{kind}`, and arrays of int32 are wanted"
            return
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
    yield from _refusal_faults(tokenizer)


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


def _refusal_faults(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the ids and the text that no tokenizer has, and that this one takes."""
    for one in (-1, tokenizer.vocab_size):
        wanted = "an id outside the vocabulary raises ValueError"
        try:
            text = tokenizer.decode([one])
        except ValueError:
            continue
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            yield f"`decode([{one}])` raised {located(error)}: {wanted}"
        else:
            yield f"`decode([{one}])` returns {text!r:.40}: {wanted}"
        break
    wanted = "a lone surrogate raises UnicodeEncodeError, or DataError where its text is refused"
    try:
        ids = tokenizer.encode(_SURROGATE)
    except (UnicodeEncodeError, DataError):
        return
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        yield f"`encode({_SURROGATE!r})` raised {located(error)}: {wanted}"
    else:
        yield f"`encode({_SURROGATE!r})` returns {list(ids)!r:.40}: {wanted}"
