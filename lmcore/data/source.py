"""Reads JSON lines; the other formats, and how any input is opened, are in `lmcore.data.input`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import cast

from lmcore.data.input.batch import LineBatch
from lmcore.data.input.compression import STDIN, open_text
from lmcore.data.input.files import InputFile, resolve_inputs
from lmcore.data.input.options import InputOptions
from lmcore.data.input.read import read_input

__all__ = ["STDIN", "LineBatch", "open_text", "read_batches", "resolve_inputs"]


def read_batches(
    files: Sequence[str], *, max_bytes: int = 1 << 20
) -> Generator[LineBatch, None, None]:
    """Yield the lines of all files in order, never lines of two files together.

    Args:
        files: As `resolve_inputs` returns them.
        max_bytes: A batch has about so many bytes, and whole lines.

    Raises:
        DataError: A file that cannot be read to its end.
    """
    named = [InputFile(path, "jsonl") for path in files]
    batches = read_input(named, InputOptions(batch_bytes=max_bytes))
    return cast("Generator[LineBatch, None, None]", batches)
