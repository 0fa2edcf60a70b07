"""Tests of files that are written, and tensors checked, only while a processor is idle."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from suite.memory import huge_page_bytes
from suite.threads import idle_threads

from lmcore.base.idle_work import background_writer, idle_work_waited_for, is_finite_when_idle
from lmcore.base.threads import lower_priority
from lmcore.checkpoint.files import synced_file
from lmcore.checkpoint.files.synced_file import BLOCK_BYTES, SyncedFile

_native = pytest.importorskip("lmcore._native", reason="lmcore was built without a C++ compiler")
if not hasattr(_native, "BackgroundWriter"):
    pytest.skip("only on Linux", allow_module_level=True)

MIB = 1024 * 1024
CONTENT = os.urandom(1009) * (2 * BLOCK_BYTES // 1009 + 2000)
SHARED_MEMORY = Path("/dev/shm")


def in_background(work: Callable[[], Any]) -> Any:
    """Return the result of *work* in a thread with lower priority."""
    results = []

    def run() -> None:
        lower_priority()
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(params=["disk", "memory"])
def folder(request: Any, tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk, and one of a file system without a disk."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no file system in memory")
    found = SHARED_MEMORY / f"lmcore-{os.getpid()}"
    found.mkdir()
    yield found
    for path in found.iterdir():
        path.unlink()
    found.rmdir()


def test_lengths(folder: Path):
    """Bytes and checksum are right for every length, however the content is divided."""
    lengths = [*range(130), MIB, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, len(CONTENT)]
    for length in lengths:
        for cut in {0, length // 3, length}:
            content = memoryview(CONTENT)[:length]
            with (folder / "file").open("wb", buffering=0) as file:
                writer = _native.BackgroundWriter(file.fileno())
                writer.append(content[:cut])
                writer.append(content[cut:])
                writer.finish()
            assert (folder / "file").read_bytes() == content
            assert (writer.checksum, writer.error) == (zlib.crc32(content), 0)


def test_files_are_the_same_in_the_background(tmp_path: Path):
    """A thread with lower priority writes the same bytes as another one."""

    def save(name: str) -> SyncedFile:
        with SyncedFile(tmp_path / name) as stream:
            stream.write(CONTENT[:1000])
            stream.write(memoryview(CONTENT)[1000:])
            assert stream.tell() == len(CONTENT)
        return stream

    usual, other = save("usual"), in_background(lambda: save("background"))
    assert usual.entry() == other.entry()
    assert (tmp_path / "usual").read_bytes() == (tmp_path / "background").read_bytes() == CONTENT


def test_threads_that_get_it(tmp_path: Path):
    """A thread with lower priority gets a writer, another one does not."""
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert background_writer(file.fileno()) is None
        assert in_background(lambda: background_writer(file.fileno())) is not None


def test_the_thread_takes_idle_processors():
    """The thread that writes has the class SCHED_IDLE; it ends with the file."""
    with Path(os.devnull).open("wb", buffering=0) as file:
        writer = _native.BackgroundWriter(file.fileno())
        writer.append(CONTENT)
        assert len(idle_threads()) == 1
        writer.finish()
    assert not idle_threads()


def test_memory_of_huge_pages():
    """A block is of huge pages, which a disk takes in one request."""
    before = huge_page_bytes()
    with Path(os.devnull).open("wb", buffering=0) as file:
        writer = _native.BackgroundWriter(file.fileno())
        assert huge_page_bytes() - before == BLOCK_BYTES
        del writer
    assert huge_page_bytes() == before


def test_while_it_is_waited_for():
    """The caller writes, without another thread."""
    with Path(os.devnull).open("wb", buffering=0) as file, idle_work_waited_for():
        writer = _native.BackgroundWriter(file.fileno())
        writer.append(CONTENT)
        assert not idle_threads()
        writer.finish()
    assert writer.checksum == zlib.crc32(CONTENT)


def test_it_is_waited_for_meanwhile(tmp_path: Path):
    """The caller continues where the thread stopped, and the thread where the caller did."""
    finished = threading.Event()

    def change() -> None:
        while not finished.wait(0.002):
            with idle_work_waited_for():
                finished.wait(0.002)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with (tmp_path / "file").open("wb", buffering=0) as file:
            writer = _native.BackgroundWriter(file.fileno())
            for _ in range(10):
                writer.append(CONTENT)
            writer.finish()
    finally:
        finished.set()
        thread.join()
    assert writer.checksum == zlib.crc32(10 * CONTENT)
    assert (tmp_path / "file").read_bytes() == 10 * CONTENT


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error is kept, and raised when the file is checked or closed."""
    with Path("/dev/full").open("wb", buffering=0) as file:
        writer = _native.BackgroundWriter(file.fileno())
        writer.append(CONTENT)
        writer.append(CONTENT)
        assert writer.error == errno.ENOSPC
        writer.finish()
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(synced_file, "background_writer", lambda _: _native.BackgroundWriter(full))
    stream = SyncedFile(tmp_path / "file")
    assert stream.write(CONTENT) == len(CONTENT)
    with pytest.raises(OSError, match="No space left") as caught:
        stream.check()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    stream = SyncedFile(tmp_path / "other")
    stream.write(b"a rest, which `close` writes")
    stream.check()
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    os.close(full)


def test_no_thread_left(tmp_path: Path):
    """The caller writes if the system has no memory for another thread."""
    program = """
import os, resource, sys, zlib
from lmcore import _native
content = bytes(range(256)) * 65536
with open(sys.argv[1], "wb", buffering=0) as file:
    writer = _native.BackgroundWriter(file.fileno())
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    writer.append(content)
    threads = len(os.listdir("/proc/self/task"))
    writer.finish()
print(writer.checksum == zlib.crc32(content), writer.error, threads)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True 0 1\n"
    assert (tmp_path / "file").stat().st_size == 256 * 65536


def test_content_that_is_not_bytes(tmp_path: Path):
    """Other buffers are refused."""
    with (tmp_path / "file").open("wb", buffering=0) as file:
        writer = _native.BackgroundWriter(file.fileno())
        for content in (memoryview(b"abcd")[::2], memoryview(b"abcd").cast("I")):
            with pytest.raises(ValueError, match="not a contiguous buffer of bytes"):
                writer.append(content)


BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
"""Bits of the mantissa, by dtype."""


def from_bits(dtype: torch.dtype, bits: int) -> torch.Tensor:
    """Return a number by its bits."""
    width = dtype.itemsize
    content = (bits % 2 ** (8 * width)).to_bytes(width, sys.byteorder)
    return torch.frombuffer(bytearray(content), dtype=dtype)[0]


@pytest.mark.parametrize("dtype", BITS)
def test_numbers_that_are_not_finite(dtype: torch.dtype):
    """NaN, infinity and their negatives are found at any position; the largest numbers are not."""
    mantissa, width = BITS[dtype], 8 * dtype.itemsize
    infinity = (2 ** (width - 1 - mantissa) - 1) << mantissa
    sign = 1 << (width - 1)
    found = [infinity, infinity | sign, infinity | 1, infinity | sign | 1 << (mantissa - 1)]
    for bits in (*found, infinity - 1, (infinity - 1) | sign, 0, 1):
        number = from_bits(dtype, bits)
        assert bool(number.isfinite()) is (bits not in found)
        for size in (1, 7, MIB):
            for place in (0, size // 2, size - 1):
                tensor = torch.zeros(size, dtype=dtype)
                tensor[place] = number
                assert is_finite_when_idle(tensor) is (bits not in found)


def test_other_tensors():
    """Tensors of other dtypes and layouts, and none at all, are checked like any other."""
    matrix = torch.zeros(600, 700)
    matrix[3, 5] = math.inf
    assert not is_finite_when_idle(matrix.T)
    assert not is_finite_when_idle(matrix[:, 5])
    assert is_finite_when_idle(matrix[:, 6:])
    assert is_finite_when_idle(torch.zeros(0))
    assert is_finite_when_idle(torch.tensor(1.5, requires_grad=True))
    assert is_finite_when_idle(torch.arange(5))
    assert not is_finite_when_idle(torch.tensor([1j * math.inf]))


def test_the_check_takes_idle_processors():
    """The thread that checks has the class SCHED_IDLE; the caller checks if it is waited for."""
    numbers, found, finished = torch.zeros(4 * MIB), threading.Event(), threading.Event()

    def watch() -> None:
        while not finished.is_set():
            if idle_threads():
                found.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with idle_work_waited_for():
            for _ in range(10):
                assert is_finite_when_idle(numbers)
        assert not found.is_set()
        deadline = time.monotonic() + 30
        while not found.is_set() and time.monotonic() < deadline:
            assert is_finite_when_idle(numbers)
        assert found.is_set()
    finally:
        finished.set()
        thread.join()
