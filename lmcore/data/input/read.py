"""Reading of the input: each file with the reader of its format, and the handling of damage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from lmcore.data.input.batch import Batch, LineBatch
from lmcore.data.input.compression import CutShortError, DamagedError
from lmcore.data.input.files import Format, InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import InputProblem, Reason

__all__ = ["read_input"]

Reader = Callable[[InputFile, InputOptions], Generator[Batch, None, None]]

_READERS: dict[Format, str] = {
    "jsonl": "json_lines",
    "json": "json_objects",
    "text": "plain_text",
    "csv": "csv_table",
    "tsv": "csv_table",
    "parquet": "parquet",
    "arrow": "arrow",
}
"""Module of the reader of each format, imported on demand."""


def read_input(files: Iterable[InputFile], options: InputOptions) -> Generator[Batch, None, None]:
    """Yield the documents of all files in order; a batch never spans two files.

    The batches depend only on the contents of the files and the options.

    Raises:
        DataError: a file that cannot be opened, or cannot be read to its end; with `options.skip`
            the latter is a problem in the last batch of the file.
    """
    for file in files:
        with closing(_reader_of(file.format)(file, options)) as batches:
            yield from _with_damage(file, batches) if options.skip else batches


def _reader_of(format_: Format) -> Reader:
    module = importlib.import_module(f"lmcore.data.input.{_READERS[format_]}")
    reader: Reader = module.read
    return reader


def _with_damage(
    file: InputFile, batches: Generator[Batch, None, None]
) -> Generator[Batch, None, None]:
    """Yield the batches, and an error that ends them early as a problem of the file."""
    try:
        yield from batches
    except DamagedError as error:
        reason: Reason = "cut short" if isinstance(error, CutShortError) else "damaged"
        problem = InputProblem(file.path, 0, reason, error.why or error.what, error.hint, "file")
        yield LineBatch(file.path, 1, b"", problems=(problem,))
