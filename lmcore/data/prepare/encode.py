"""Encoding of documents to tokens: the part of `lmcore data prepare` in worker processes.

C++ encodes only lines that are certainly valid.  Python encodes all other lines, or describes
their faults, and its tokens are inserted so that documents stay in the order of the input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import LmcoreError
from lmcore.data.input.batch import Batch, LineBatch
from lmcore.data.input.compression import BOM
from lmcore.data.input.document import byte_order_mark, text_of
from lmcore.data.input.problem import BadDocument, InputProblem
from lmcore.data.prepare.encode_types import EncodedBatch, EncodePlan, KeyTokens
from lmcore.data.prepare.sentences import SentenceSplitter
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.native import BlockTokens, EncodesBlocks

__all__ = ["EncodePlan", "EncodedBatch", "KeyTokens", "encode_batch", "encode_sentences"]

_SKIP = "or skip such lines with `--on-error skip`"
_FIX_TEXT = "repair such texts with `lmcore data clean fix`, or skip them with `--on-error skip`"
_TOKENS, _LENGTHS = 3, 4  # columns of `doubts` for the first key; two per key
_T = TypeVar("_T", bound=np.integer)


def encode_batch(batch: Batch, tokenizer: Tokenizer, plan: EncodePlan) -> EncodedBatch:
    """Encode the documents of a batch.

    Blank lines are ignored.  A document without tokens counts as empty and is left out.

    Args:
        batch: documents of one file.
        tokenizer: tokenizer of the documents.
        plan: settings of all workers.

    Returns:
        The tokens, the number of bad documents by reason, and the first bad document.
    """
    whole = plan.splitter is None
    if whole and isinstance(batch, LineBatch) and isinstance(tokenizer, EncodesBlocks):
        block = tokenizer.encode_block(batch.block, plan.keys, plan.end, plan.dtype)
        if block is not None:
            return _join_block(
                batch, block, plan, lambda lines: _encode_documents(lines, tokenizer, plan)
            )
    return _encode_documents(batch, tokenizer, plan)


def _encode_documents(batch: Batch, tokenizer: Tokenizer, plan: EncodePlan) -> EncodedBatch:
    """Encode documents in Python: the reference for the C++ path of `encode_batch`."""
    found = list(batch.problems)
    if isinstance(batch, LineBatch):
        rows, numbers = _parsed(batch, plan, found)
    else:
        rows, numbers = list(zip(*batch.columns, strict=True)), list(batch.numbers)
    rows = _encodable(rows, numbers, tokenizer, batch, found)
    columns = zip(*rows, strict=True) if rows else ((),) * len(plan.keys)
    return EncodedBatch(
        keys=tuple(_encode_key(list(texts), tokenizer, plan) for texts in columns),
        documents=len(rows),
        json_bytes=batch.size,
        skipped=Counter(problem.reason for problem in found),
        problem=min(found, key=lambda problem: problem.line, default=None),
    )


def _parsed(
    batch: LineBatch, plan: EncodePlan, found: list[InputProblem]
) -> tuple[list[tuple[str, ...]], list[int]]:
    """Return the texts of each valid line, and the line numbers."""
    rows: list[tuple[str, ...]] = []
    numbers: list[int] = []
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if line.isspace():
            continue
        try:
            rows.append(_texts(line, plan.keys))
            numbers.append(number)
        except BadDocument as bad:
            found.append(bad.at(batch.source, number))
            if plan.stop:
                break
    return rows, numbers


def _texts(line: bytes, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the text of each key; raise `BadDocument` if the line does not have them."""
    try:
        record = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise BadDocument("not UTF-8", detail, f"convert the file to UTF-8, {_SKIP}") from None
    except RecursionError:
        raise BadDocument("broken JSON", "nested too deeply") from None
    except ValueError as error:
        if line.startswith(BOM):
            raise byte_order_mark() from None
        hint = _ONE_LINE if line.strip() in (b"{", b"[") else _other_format(line)
        raise BadDocument("broken JSON", _json_error(error), hint) from None
    if not isinstance(record, dict):
        kind = _JSON_NAMES.get(type(record), "a number")
        hint = _ONE_LINE if isinstance(record, list) else None
        raise BadDocument("broken JSON", f"a document is a JSON object, this line is {kind}", hint)
    return tuple(text_of(record, key, "--json-keys") for key in keys)


_JSON_NAMES = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
_ONE_LINE = (
    "JSON lines have one object per line; `--input-format json` reads arrays and objects over "
    "several lines"
)


def _other_format(line: bytes) -> str | None:
    """Return a hint if a line does not look like JSON at all."""
    if line.lstrip()[:1] in (b"{", b"[", b""):
        return None
    return (
        f"give the format of the input with `--input-format`: text, csv, tsv ...; or fix the line, "
        f"{_SKIP}"
    )


def _json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error)


def _encodable(
    rows: list[tuple[str, ...]],
    numbers: list[int],
    tokenizer: Tokenizer,
    batch: Batch,
    found: list[InputProblem],
) -> list[tuple[str, ...]]:
    """Return the rows that the tokenizer accepts; add rejected rows to *found*."""
    kept = []
    unit = "line" if isinstance(batch, LineBatch) else batch.unit
    for row, number in zip(rows, numbers, strict=True):
        try:
            for text in row:
                text.encode()
                if not tokenizer.encodes_any_text:
                    tokenizer.encode(text)
        except (UnicodeEncodeError, LmcoreError) as error:
            hint = _FIX_TEXT if isinstance(error, UnicodeEncodeError) else None
            bad = BadDocument("not encodable", _reason(error), hint)
            found.append(bad.at(batch.source, number, unit))
        else:
            kept.append(row)
    return kept


def _reason(error: UnicodeEncodeError | LmcoreError) -> str:
    if isinstance(error, LmcoreError):
        return error.what
    return f"the lone surrogate U+{ord(error.object[error.start]):04X} is not a character"


def _encode_key(texts: list[str], tokenizer: Tokenizer, plan: EncodePlan) -> KeyTokens:
    if plan.splitter is not None:
        found = encode_sentences(texts, tokenizer, plan.splitter, plan.end)
        return replace(found, tokens=_narrowed(found.tokens, plan.dtype))
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
        lengths += 1  # counted: an index without it would shift all later documents
    joined = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return KeyTokens(_narrowed(joined, plan.dtype), lengths, empty)


def _narrowed(
    tokens: npt.NDArray[np.integer], dtype: np.dtype[np.integer]
) -> npt.NDArray[np.integer]:
    """Return *tokens* as *dtype*, or unchanged if they do not fit, which the writer reports."""
    limits = np.iinfo(dtype)
    fits = not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) <= limits.max)
    return tokens.astype(dtype) if fits else tokens


def encode_sentences(
    texts: Sequence[str], tokenizer: Tokenizer, splitter: SentenceSplitter, end: int | None
) -> KeyTokens:
    """Encode each sentence of each text as a sequence.

    A sentence without tokens is dropped; a text without sentences counts as empty.

    Args:
        texts: the documents.
        tokenizer: tokenizer of the sentences.
        splitter: sentence splitter.
        end: id appended to the last sentence of a document, or None.
    """
    split = [list(splitter.split(text)) for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for text in split for sentence in text]))
    pieces: list[npt.NDArray[np.integer]] = []
    lengths: list[int] = []
    per_document: list[int] = []
    last = np.array([] if end is None else [end], dtype=np.int32)
    for sentences in split:
        kept = [ids for ids in islice(encoded, len(sentences)) if len(ids)]
        if not kept:
            continue
        pieces += [*kept, last]
        lengths += map(len, kept)
        lengths[-1] += len(last)  # counted: an index without it would shift all later documents
        per_document.append(len(kept))
    return KeyTokens(
        np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        len(texts) - len(per_document),
        np.array(per_document, dtype=np.int32),
    )


def _join_block(
    batch: LineBatch,
    block: BlockTokens,
    plan: EncodePlan,
    encode_lines: Callable[[LineBatch], EncodedBatch],
) -> EncodedBatch:
    """Return the tokens of all lines of *batch*.

    Args:
        batch: the lines.
        block: result of C++.
        plan: settings of all workers; with `stop` the lines after the first bad one are dropped.
        encode_lines: encodes lines in Python.
    """
    columns = tuple(KeyTokens(*column) for column in block.columns)
    own = EncodedBatch(columns, block.documents, batch.size)
    places: list[npt.NDArray[np.int64]] = []
    pieces: list[EncodedBatch] = []
    for rows in _neighbours(block.doubts):
        begin, end = int(rows[0, 1]), int(rows[-1, 2])
        lines = LineBatch(batch.source, batch.first_line + int(rows[0, 0]), batch.block[begin:end])
        pieces.append(encode_lines(lines))
        places.append(rows[0])
        if plan.stop and pieces[-1].problem is not None:
            break
    if pieces:
        own = _spliced(own, places, pieces)
    return _with_problems(own, batch)


def _neighbours(doubts: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the lines left to Python in groups of adjacent lines."""
    if len(doubts):
        apart = np.flatnonzero(doubts[1:, 1] != doubts[:-1, 2]) + 1
        yield from np.split(doubts, apart)


def _spliced(
    own: EncodedBatch, places: list[npt.NDArray[np.int64]], pieces: list[EncodedBatch]
) -> EncodedBatch:
    keys = []
    for i, column in enumerate(own.keys):
        tokens = _inserted(
            column.tokens, [p[_TOKENS + 2 * i] for p in places], [e.keys[i].tokens for e in pieces]
        )
        lengths = _inserted(
            column.lengths,
            [p[_LENGTHS + 2 * i] for p in places],
            [e.keys[i].lengths for e in pieces],
        )
        empty = column.empty + sum(piece.keys[i].empty for piece in pieces)
        keys.append(KeyTokens(tokens, lengths, empty))
    problems = (piece.problem for piece in pieces if piece.problem is not None)
    return EncodedBatch(
        tuple(keys),
        own.documents + sum(piece.documents for piece in pieces),
        own.json_bytes,
        sum((piece.skipped for piece in pieces), Counter()),
        next(problems, None),
    )


def _inserted(
    values: npt.NDArray[_T], places: list[np.int64], pieces: list[npt.NDArray[_T]]
) -> npt.NDArray[_T]:
    parts = np.split(values, places)
    joined = [parts[0]]
    for piece, part in zip(pieces, parts[1:], strict=True):
        joined += [piece, part]
    return np.concatenate(joined)


def _with_problems(encoded: EncodedBatch, batch: LineBatch) -> EncodedBatch:
    """Add the problems found while the batch was read."""
    if not batch.problems:
        return encoded
    found = [*batch.problems, *([encoded.problem] if encoded.problem else [])]
    return replace(
        encoded,
        skipped=encoded.skipped + Counter(problem.reason for problem in batch.problems),
        problem=min(found, key=lambda problem: problem.line),
    )
