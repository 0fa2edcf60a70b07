"""Opening inputs: what they are compressed with, members, damage."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
import zstandard

from lmcore.base.errors import DataError, MissingPackageError
from lmcore.data.input import compression
from lmcore.data.input.compression import (
    CutShortError,
    DamagedError,
    blocks,
    open_input,
    open_text,
)
from lmcore.data.input.files import find_inputs

TEXT = b"".join(b'{"text": "line %d"}\n' % i for i in range(5000))
HALF = len(TEXT) // 2


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS = {
    "plain": bytes,
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstd,
}
ARCHIVES = [kind for kind in PACKERS if kind != "plain"]


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("ending", [".jsonl", ".json.gz"])
def test_compression_is_detected_by_content(tmp_path, kind, ending):
    """Every compression is read, whatever the file is called."""
    path = tmp_path / f"x{ending}"
    path.write_bytes(PACKERS[kind](TEXT))
    with open_text(str(path)) as stream:
        assert stream.read() == TEXT


@pytest.mark.parametrize("kind", ARCHIVES)
def test_many_members_are_read_to_the_end(tmp_path, kind):
    """Concatenated archives, as corpora are merged, give all their lines."""
    path = tmp_path / "x"
    path.write_bytes(PACKERS[kind](TEXT[:HALF]) + PACKERS[kind](b"") + PACKERS[kind](TEXT[HALF:]))
    with open_text(str(path)) as stream:
        assert b"".join(stream) == TEXT


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("members", [1, 2])
def test_cut_archive_is_an_error(tmp_path, kind, members):
    """An archive that ends too early never passes for a shorter corpus."""
    path = tmp_path / "x"
    path.write_bytes((PACKERS[kind](TEXT) * members)[:-9])
    with pytest.raises(DataError, match="is cut short"), open_text(str(path)) as stream:
        stream.read()


@pytest.mark.parametrize("kind", ARCHIVES)
def test_altered_archive_is_an_error(tmp_path, kind):
    """An archive with altered bytes is an error that names the file."""
    packed = bytearray(PACKERS[kind](TEXT))
    middle = len(packed) // 2
    packed[middle : middle + 40] = bytes(40)
    path = tmp_path / "altered"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="altered"), open_text(str(path)) as stream:
        stream.read()


def test_standard_input_may_be_compressed(monkeypatch):
    """`-` reads standard input, unpacked."""
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(TEXT))))
    monkeypatch.setattr(sys, "stdin", stdin)
    with open_text("-") as stream:
        assert stream.read() == TEXT


def test_missing_zstandard_names_the_command(tmp_path, monkeypatch):
    """Without the package a `.zst` file is answered with what installs it."""
    (tmp_path / "x").write_bytes(zstd(TEXT))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with (
        pytest.raises(MissingPackageError, match="pip install zstandard"),
        open_text(str(tmp_path / "x")),
    ):
        pass


def test_other_binary_files_fail_as_lines_not_as_archives(tmp_path):
    """A compression that is not known is read as it is: its lines are then not UTF-8."""
    (tmp_path / "x.lz4").write_bytes(b"\x04\x22\x4d\x18" + TEXT)
    with open_text(str(tmp_path / "x.lz4")) as stream:
        assert stream.read(3) == b"\x04\x22\x4d"


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_padding_between_and_after_members_is_passed_over(tmp_path, kind):
    """Zeros that fill an archive up to a block, even more of them than one read, are no damage."""
    packed = PACKERS[kind](TEXT)
    (tmp_path / "x").write_bytes(packed + bytes(200_000) + packed + bytes(512))
    with open_text(str(tmp_path / "x")) as stream:
        assert stream.read() == TEXT * 2


def test_what_follows_an_archive_is_damage(tmp_path):
    """Bytes after the last member that are no member are an error, not left out quietly."""
    (tmp_path / "x").write_bytes(gzip.compress(TEXT) + b"rest")
    with pytest.raises(DamagedError, match="is damaged"), open_text(str(tmp_path / "x")) as stream:
        stream.read()


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_of_zeros_takes_no_memory(tmp_path, kind):
    """An archive that grows a thousand times is unpacked a piece at a time."""
    (tmp_path / "x").write_bytes(PACKERS[kind](bytes(1 << 26)))
    tracemalloc.start()
    try:
        size = 0
        with open_text(str(tmp_path / "x")) as stream:
            while piece := stream.read(1 << 16):
                size += len(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 1 << 26
    assert peak < 1 << 25


def test_xz_that_wants_much_memory_is_refused(tmp_path):
    """An xz stream with a huge dictionary is an error that says so."""
    filters = [
        {"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29, "mode": lzma.MODE_FAST, "mf": lzma.MF_HC3}
    ]
    header = lzma.LZMACompressor(lzma.FORMAT_XZ, filters=filters).compress(b"")
    (tmp_path / "x").write_bytes(header + bytes(64))
    with pytest.raises(DamagedError, match="damaged"), open_text(str(tmp_path / "x")) as stream:
        stream.read()


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("size", [5, 1000, 1 << 20])
def test_blocks_do_not_depend_on_the_pieces_of_a_pipe(tmp_path, kind, size):
    """Blocks have their size but for the last one, without the byte-order mark."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    packed = PACKERS[kind](b"\xef\xbb\xbf" + TEXT)

    def write() -> None:
        with path.open("wb", buffering=0) as pipe:
            for start in range(0, len(packed), 777):
                pipe.write(packed[start : start + 777])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with open_input(str(path)) as opened:
        found = list(blocks(opened, size))
    writer.join()
    assert b"".join(found) == TEXT
    assert {len(block) for block in found[1:-1]} <= {size}
    assert len(found[0]) in {size, size - 3, len(TEXT)}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_content_before_damage_comes_first(tmp_path, kind):
    """All of the first member is read before the cut second one raises."""
    (tmp_path / "x").write_bytes(PACKERS[kind](TEXT) + PACKERS[kind](TEXT)[:-9])
    found = []

    def read() -> None:
        with open_input(str(tmp_path / "x")) as opened:
            for block in blocks(opened, 1 << 22):
                found.append(block)  # noqa: PERF402  # what came before the error is wanted

    with pytest.raises(CutShortError, match="cut short"):
        read()
    assert b"".join(found).startswith(TEXT)


@pytest.mark.parametrize("kind", PACKERS)
def test_position_counts_the_bytes_on_the_disk(tmp_path, kind):
    """At the end the position is the file's size, compressed or not."""
    path = tmp_path / "x"
    path.write_bytes(PACKERS[kind](TEXT))
    with open_input(str(path)) as opened:
        opened.stream.read()
        assert opened.position() == path.stat().st_size


def test_zstd_that_begins_to_grow_takes_a_bounded_amount(tmp_path):
    """A zstd archive that is harmless at first and then grows is unpacked in smaller steps."""
    content = random.Random(1).randbytes(1 << 16) + bytes(1 << 29)
    (tmp_path / "x").write_bytes(zstd(content))
    tracemalloc.start()
    try:
        with open_text(str(tmp_path / "x")) as stream:
            size = sum(len(piece) for piece in iter(lambda: stream.read(1 << 16), b""))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == len(content)
    assert peak < 1.2 * (1 << 28)  # one step of input, and its copy


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(name):
    """A device, which may have no end, is an error wherever it is given, not a wait."""
    with pytest.raises(DataError, match=f"`{name}` is a device"), open_text(name):
        pass
    with pytest.raises(DataError, match=f"`{name}` is a device"):
        find_inputs([name])


@pytest.mark.parametrize("empty", [False, True])
def test_a_pipe_without_a_writer_is_waited_for_with_a_line(tmp_path, caplog, monkeypatch, empty):
    """A named pipe is opened before its writer comes; after a while a line says what is missing."""
    monkeypatch.setattr(compression, "_SILENT_SECONDS", 0.01)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = b"" if empty else TEXT
    found = []

    def read() -> None:
        with open_text(str(path)) as stream:
            found.append(stream.read())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while not caplog.messages:
        time.sleep(0.001)
    path.write_bytes(content)
    reader.join()
    assert found == [content]
    said = f"waiting for data from the pipe `{path}`: no program has written to it"
    assert caplog.messages == [said]


def test_a_pipe_with_a_writer_is_read_in_silence(tmp_path, caplog):
    """The pipe of `<(command)`, with and without data, needs no line."""
    for content in (b"", TEXT[:1000]):
        end, other = os.pipe()
        os.write(other, content)
        os.close(other)
        with open_text(f"/dev/fd/{end}") as stream:
            assert stream.read() == content
        os.close(end)
    assert not caplog.messages


WIDE = ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("kind", ["plain", "gz", "zst"])
@pytest.mark.parametrize("encoding", WIDE)
def test_wide_text_is_named(tmp_path, kind, encoding):
    """UTF-16 and UTF-32, with a byte-order mark or without, are named with the command to use."""
    path = tmp_path / "x.jsonl"
    text = '{"text": "Günaydin, dünya"}\n' * 9
    path.write_bytes(PACKERS[kind](text.encode(encoding)))
    with pytest.raises(DataError) as caught, open_text(str(path)):
        pass
    family = encoding.upper()[:6]
    assert caught.value.what == f"`{path}` is {family}, not UTF-8"
    named = family if encoding.count("-") == 1 else encoding.upper().replace("-LE", "LE")
    assert f"iconv -f {named.replace('-BE', 'BE')} -t UTF-8 {path}" in caught.value.hint


def test_pointers_of_git_lfs_are_refused(tmp_path):
    """A file that is not fetched is no text, also if files were joined by `cat`."""
    path = tmp_path / "c4-train.json.gz"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 318903435\n"
    path.write_bytes(pointer * 8)
    with pytest.raises(DataError, match="is a pointer of Git LFS") as caught, open_text(str(path)):
        pass
    assert "`git lfs pull`" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4096,
        b"ab" * 99,
        b"a\0b" * 99,
        "日本語\n".encode() * 99,
        b"\x80\0" * 9 + b"ab" * 99,
        np.arange(4096, dtype="<u4").tobytes(),
    ],
)
def test_other_content_is_not_wide_text(tmp_path, content):
    """UTF-8, with zero bytes too, and binary data are left to the readers."""
    (tmp_path / "x").write_bytes(content)
    with open_text(str(tmp_path / "x")) as stream:
        assert stream.read() == content
