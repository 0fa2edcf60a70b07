"""All formats together: the same documents, damage, memory."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.input.batch import LineBatch
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.read import read_input
from lmcore.data.prepare.encode import encode_batch
from lmcore.data.prepare.encode_types import EncodePlan
from lmcore.data.tokenizer import ByteTokenizer

PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def _table(texts, delimiter):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([("text",), *((text,) for text in texts)])
    return out.getvalue().encode()


def _arrow(texts):
    sink = io.BytesIO()
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def _parquet(texts):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), sink, row_group_size=5)
    return sink.getvalue()


WRITERS = {
    "jsonl": lambda texts: b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts),
    "json": lambda texts: json.dumps([{"text": t} for t in texts], indent=1).encode(),
    "csv": lambda texts: _table(texts, ","),
    "tsv": lambda texts: _table(texts, "\t"),
    "text": lambda texts: "\n\n".join(texts).encode(),
    "arrow": _arrow,
    "parquet": _parquet,
}
LINE = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff"), min_size=1, max_size=30
).filter(str.strip)
TEXTS = st.lists(st.lists(LINE, min_size=1, max_size=3).map("\n".join), min_size=1, max_size=20)


def tokens_of(path, format_, *, batch_bytes=1 << 20, keys=("text",), skip=False):
    """Return the documents of a file as bytes, by way of the encoder."""
    options = InputOptions(
        keys, document_per="paragraph", quotes=True, batch_bytes=batch_bytes, skip=skip
    )
    plan = EncodePlan(keys, end=None, dtype=np.dtype(np.uint16), stop=False)
    documents, problems = [], []
    for batch in read_input([InputFile(str(path), format_)], options):
        encoded = encode_batch(batch, ByteTokenizer(), plan)
        tokens = encoded.keys[0].tokens.tolist()
        for length in encoded.keys[0].lengths.tolist():
            documents.append(bytes(tokens[:length]))
            del tokens[:length]
        problems.extend([encoded.problem] if encoded.problem else [])
    return documents, problems


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("format_", WRITERS)
@settings(max_examples=settings().max_examples // 5, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, batch_bytes=st.integers(1, 200))
def test_every_format_gives_the_same_documents(
    tmp_path_factory, format_, ending, texts, batch_bytes
):
    """Random texts come out of every format and compression as they went in."""
    if ending and format_ == "parquet":
        return  # compressed inside; test_columns.py tells of the message
    path = tmp_path_factory.mktemp("same") / f"x{ending}"
    path.write_bytes(PACKERS[ending](WRITERS[format_](texts)))
    documents, problems = tokens_of(path, format_, batch_bytes=batch_bytes)
    assert problems == []
    assert documents == [text.encode() for text in texts]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("format_", ["jsonl", "json", "csv", "text", "arrow"])
def test_cut_archive_stops_or_is_counted(tmp_path, format_, ending):
    """A cut archive raises; where problems are skipped its whole documents come, and it counts."""
    texts = [f"{i} {'x' * (i % 7)}" for i in range(2000)]
    path = tmp_path / f"x{ending}"
    pack = PACKERS[ending]
    path.write_bytes(pack(WRITERS[format_](texts))[:-9])
    with pytest.raises(DataError, match="is cut short"):
        tokens_of(path, format_)
    documents, problems = tokens_of(path, format_, skip=True)
    assert documents == [text.encode() for text in texts[: len(documents)]]
    assert [problem.reason for problem in problems][-1] == "cut short"
    assert problems[-1].where == f"`{path}`"


def test_next_file_is_read_after_a_damaged_one(tmp_path):
    """A damaged file does not end a run that skips problems."""
    (tmp_path / "1").write_bytes(gzip.compress(WRITERS["jsonl"](["a"]))[:-5])
    (tmp_path / "2").write_bytes(WRITERS["jsonl"](["b"]))
    files = [InputFile(str(tmp_path / name), "jsonl") for name in "12"]
    batches = list(read_input(files, InputOptions(skip=True)))
    assert all(isinstance(batch, LineBatch) for batch in batches)
    assert batches[-1].block == b'{"text": "b"}\n'


_HUNGRY = """
import sys
from lmcore.data.input.files import InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.read import read_input
options = InputOptions(document_per=sys.argv[3], max_document_bytes=4 << 20, skip=True)
size = reasons = 0
for batch in read_input([InputFile(sys.argv[1], sys.argv[2])], options):
    size += batch.size
    reasons += len(batch.problems)
print(size, reasons)
"""


@pytest.mark.parametrize(
    "format_, start, unit, per",
    [
        ("jsonl", b'{"text": "', b"y", "file"),
        ("json", b'[{"text": "', b"y", "file"),
        ("json", b"[", b'{"text": "' + b"y" * 999 + b'"},\n', "file"),
        ("csv", b'text\n"', b"y" * 999 + b"\n", "file"),
        ("csv", b"text\n", b"y", "file"),
        ("text", b"", b"y", "file"),
        ("text", b"", b"y", "line"),
        ("text", b"", b"y" * 999 + b"\n", "paragraph"),
    ],
)
def test_memory_does_not_grow_with_what_does_not_end(tmp_path, format_, start, unit, per):
    """Neither a line, field, object or paragraph without end nor a long array fills the memory.

    They are read out of a small archive in a process that may not have as much.
    """
    path = tmp_path / "x.zst"
    packer = zstandard.ZstdCompressor().compressobj()
    piece = unit * ((1 << 20) // len(unit))
    mebibytes = 256 if len(unit) == 1 else 96
    with path.open("wb") as file:
        file.write(packer.compress(start))
        for _ in range(mebibytes):
            file.write(packer.compress(piece))
        file.write(packer.flush())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20))

    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", _HUNGRY, str(path), format_, per],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
        cwd=tmp_path,
        env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 0


class Endless(io.RawIOBase):
    """A stream that never ends: its beginning, then one byte again and again."""

    def __init__(self, start: bytes, byte: bytes) -> None:
        self.rest, self.byte, self.given = start, byte, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self.rest[: len(buffer)] or self.byte * len(buffer)
        self.rest = self.rest[len(piece) :]
        buffer[: len(piece)] = piece
        self.given += len(piece)
        assert self.given < 1 << 24, "the reader goes on without end"
        return len(piece)


@pytest.mark.parametrize(
    "format_, unit, start, byte",
    [
        ("jsonl", "file", b"", b"\0"),
        ("jsonl", "file", b'{"text": "a"}\n{"text": "', b"a"),
        ("json", "file", b'[{"text": "', b"a"),
        ("text", "file", b"", b"\0"),
        ("text", "line", b"a\n", b"\0"),
        ("text", "paragraph", b"a\n\n", b"\0"),
        ("text", "paragraph", b"a\n\n" + b"b\n" * 2000, b"\0"),
        ("csv", "file", b"text\n", b"a"),
        ("csv", "file", b'text\n"', b"\n"),
        ("tsv", "file", b"", b"a"),
    ],
)
def test_a_line_without_an_end_is_an_error_at_the_limit(monkeypatch, format_, unit, start, byte):
    """Every reader ends at the size limit of a document, instead of looking for the line's end."""
    stream = Endless(start, byte)

    class Stdin:
        buffer = io.BufferedReader(stream)

        @staticmethod
        def isatty() -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin)
    options = InputOptions(document_per=unit, max_document_bytes=1000, batch_bytes=100)
    batches = list(read_input([InputFile("-", format_)], options))
    assert [problem.reason for batch in batches for problem in batch.problems] == ["too long"]
