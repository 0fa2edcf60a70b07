"""From JSON lines to tokens: the part of `lmcore data prepare` that runs in worker processes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmcore.data.source import LineBatch
from lmcore.data.tokenizer import Tokenizer
from lmcore.errors import DataError, LmcoreError, nearest

__all__ = ["EncodePlan", "Encoded", "KeyTokens", "Problem", "Reason", "encode_lines"]

Reason = Literal["not UTF-8", "broken JSON", "key missing", "not a string", "not encodable"]


_SKIP = "or leave such lines out with `--on-error skip`"


@dataclass(frozen=True)
class EncodePlan:
    """What every worker needs to know, beside the tokenizer.

    Attributes:
        keys: JSON keys whose text is encoded.
        end: Id appended to each document, or None.
        dtype: Type of a stored token.
        stop: Whether the first bad line ends the batch.
    """

    keys: tuple[str, ...]
    end: int | None
    dtype: np.dtype[np.integer]
    stop: bool


@dataclass(frozen=True)
class Problem:
    """A line that cannot be used."""

    source: str
    line: int
    reason: Reason
    detail: str
    hint: str | None = None

    def error(self) -> DataError:
        """Return the error that stops the run."""
        return DataError(
            f"`{self.source}` line {self.line}: {self.reason}",
            why=self.detail,
            hint=self.hint or f"mend the line, {_SKIP}",
        )


@dataclass(frozen=True)
class KeyTokens:
    """The documents of one key: their tokens one after another, and the length of each."""

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    empty: int


@dataclass(frozen=True)
class Encoded:
    """What a batch of lines gave.

    Attributes:
        keys: One entry of each key, in the plan's order.
        documents: Lines that were JSON objects with all keys.
        json_bytes: Bytes of all lines read.
        skipped: Lines left out, by reason.
        problem: The first bad line, if any.
    """

    keys: tuple[KeyTokens, ...]
    documents: int
    json_bytes: int
    skipped: Counter[Reason] = field(default_factory=Counter)
    problem: Problem | None = None


class _BadLine(Exception):  # noqa: N818  # never leaves this module
    def __init__(self, reason: Reason, detail: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.detail = detail
        self.hint = hint


def encode_lines(batch: LineBatch, tokenizer: Tokenizer, plan: EncodePlan) -> Encoded:
    """Encode the documents of *batch*; bad lines are counted, the first one is described.

    Blank lines are passed over.  A document without tokens is counted as empty and not kept.
    """
    rows: list[tuple[str, ...]] = []
    numbers: list[int] = []
    skipped: Counter[Reason] = Counter()
    problem: Problem | None = None
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if line.isspace():
            continue
        try:
            rows.append(_texts(line, plan.keys))
            numbers.append(number)
        except _BadLine as bad:
            skipped[bad.reason] += 1
            problem = problem or _problem(batch, number, bad)
            if plan.stop:
                break
    rows, problem = _encodable(rows, numbers, tokenizer, batch, skipped, problem)
    columns = zip(*rows, strict=True) if rows else ((),) * len(plan.keys)
    return Encoded(
        keys=tuple(_encode_key(list(texts), tokenizer, plan) for texts in columns),
        documents=len(rows),
        json_bytes=sum(map(len, batch.lines)),
        skipped=skipped,
        problem=problem,
    )


def _problem(batch: LineBatch, number: int, bad: _BadLine) -> Problem:
    return Problem(batch.source, number, bad.reason, bad.detail, bad.hint)


def _texts(line: bytes, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the text of each key; raise `_BadLine` for a line that does not have them."""
    try:
        record = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise _BadLine("not UTF-8", detail, f"convert the file to UTF-8, {_SKIP}") from None
    except RecursionError:
        raise _BadLine("broken JSON", "it is nested too deeply") from None
    except ValueError as error:
        hint = _ONE_LINE if line.strip() in (b"{", b"[") else None
        raise _BadLine("broken JSON", _json_error(error), hint) from None
    if not isinstance(record, dict):
        kind = _JSON_NAMES.get(type(record), "a number")
        hint = _ONE_LINE if isinstance(record, list) else None
        raise _BadLine("broken JSON", f"a document is a JSON object, this line is {kind}", hint)
    return tuple(_text(record, key) for key in keys)


_JSON_NAMES = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
_ONE_LINE = (
    "one JSON object a line is wanted; `jq -c '.[]' FILE` makes that of an array and "
    "`jq -c . FILE` of objects over several lines"
)


def _json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error)


def _text(record: dict[str, object], key: str) -> str:
    if key not in record:
        close = nearest(key, record)
        keys = ", ".join(f"`{name[:40]}`" for name in list(record)[:10]) or "none"
        hint = f"did you mean `--json-keys {close}`?" if close else f"see `--json-keys`, {_SKIP}"
        raise _BadLine("key missing", f"there is no `{key}`; its keys: {keys}", hint)
    value = record[key]
    if not isinstance(value, str):
        raise _BadLine("not a string", f"`{key}` is `{json.dumps(value)[:40]}`")
    return value


def _encodable(
    rows: list[tuple[str, ...]],
    numbers: list[int],
    tokenizer: Tokenizer,
    batch: LineBatch,
    skipped: Counter[Reason],
    problem: Problem | None,
) -> tuple[list[tuple[str, ...]], Problem | None]:
    """Leave out rows that the tokenizer refuses; the common case costs one pass over the text."""
    kept = []
    for row, number in zip(rows, numbers, strict=True):
        try:
            for text in row:
                text.encode()
                if not tokenizer.encodes_any_text:
                    tokenizer.encode(text)
        except (UnicodeEncodeError, LmcoreError) as error:
            skipped["not encodable"] += 1
            if problem is None or number < problem.line:
                problem = Problem(batch.source, number, "not encodable", _reason(error))
        else:
            kept.append(row)
    return kept, problem


def _reason(error: UnicodeEncodeError | LmcoreError) -> str:
    if isinstance(error, LmcoreError):
        return error.what
    return f"the lone surrogate U+{ord(error.object[error.start]):04X} is no character"


def _encode_key(texts: list[str], tokenizer: Tokenizer, plan: EncodePlan) -> KeyTokens:
    encoded = [ids for ids in tokenizer.encode_batch(texts) if len(ids)]
    empty = len(texts) - len(encoded)
    pieces: list[npt.NDArray[np.integer]] = []
    end = None if plan.end is None else np.array([plan.end], dtype=np.int32)
    for ids in encoded:
        pieces.append(ids)
        if end is not None:
            pieces.append(end)
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int32)
    if end is not None:
        lengths += 1  # the end counts: a size without it moves every document after this one
    joined = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return KeyTokens(_narrowed(joined, plan.dtype), lengths, empty)


def _narrowed(
    tokens: npt.NDArray[np.integer], dtype: np.dtype[np.integer]
) -> npt.NDArray[np.integer]:
    """Return *tokens* as *dtype*, or unchanged where they do not fit: the writer refuses them."""
    limits = np.iinfo(dtype)
    fits = not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) <= limits.max)
    return tokens.astype(dtype) if fits else tokens
