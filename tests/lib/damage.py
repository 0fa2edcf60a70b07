"""Damage to a file from a seed, a time limit for what reads it, a limit of size for a writer."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 20
"""Time after which a case counts as a hang."""

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, draw: random.Random) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Remove bytes at the end."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def append(path: Path, draw: random.Random) -> None:
    """Add bytes at the end."""
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 5000)))


def blank(path: Path, draw: random.Random) -> None:
    """Write zeros over a block."""
    content = bytearray(path.read_bytes())
    first = draw.randrange(len(content))
    length = min(draw.randint(1, 4096), len(content) - first)
    content[first : first + length] = bytes(length)
    path.write_bytes(content)


def swap(path: Path, draw: random.Random) -> None:
    """Exchange two blocks."""
    content = path.read_bytes()
    middle = draw.randint(1, max(len(content) - 1, 1))  # one byte stays as it is
    path.write_bytes(content[middle:] + content[:middle])


def remove(path: Path, _draw: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def other_kind(path: Path, draw: random.Random) -> None:
    """Put a directory, a named pipe, a device or a dangling link in the place of the file."""
    path.unlink()
    kind = draw.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == 2 else "absent")


def random_bytes(path: Path, draw: random.Random) -> None:
    """Replace the content, of the same size or of another."""
    size = path.stat().st_size if draw.random() < 0.5 else draw.randrange(3000)
    path.write_bytes(draw.randbytes(size))


def nested(path: Path, _draw: random.Random) -> None:
    """Replace the content by deep nesting."""
    path.write_text("[" * 50_000)


def exchanged(path: Path, draw: random.Random) -> None:
    """Exchange the file with another one of the checkpoint."""
    others = [other for other in path.parent.iterdir() if other != path]
    other = draw.choice(others)
    between = path.with_name("between")
    path.rename(between)
    other.rename(path)
    between.rename(other)


TO_A_FILE: list[Damage] = [
    *(flip, flip, flip, cut, append, blank, swap, remove, other_kind),
    *(random_bytes, nested, exchanged),
]
"""Damage that any file can have; single bits more often than the rest."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Fail if the block takes longer than `SECONDS`."""

    def hang(*_: object) -> None:
        raise AssertionError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process become larger than *size* bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
