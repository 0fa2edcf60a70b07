"""Reads the input: every file with the reader of its format, and what damage means there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from lmcore.data.input import arrow, json_lines, json_objects, parquet, plain, table
from lmcore.data.input.batch import Batch, LineBatch
from lmcore.data.input.compression import CutShortError, DamagedError
from lmcore.data.input.files import Format, InputFile
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import Problem, Reason

__all__ = ["read_input"]

Reader = Callable[[InputFile, InputOptions], Generator[Batch, None, None]]

_READERS: dict[Format, Reader] = {
    "jsonl": json_lines.read,
    "json": json_objects.read,
    "text": plain.read,
    "csv": table.read,
    "tsv": table.read,
    "parquet": parquet.read,
    "arrow": arrow.read,
}


def read_input(files: Iterable[InputFile], options: InputOptions) -> Generator[Batch, None, None]:
    """Yield the documents of all files in order, never those of two files together.

    The batches depend on the files' contents and the options alone.

    Raises:
        DataError: A file that cannot be opened, or cannot be read to its end; with
            `options.skip` the latter is a problem in the last batch of the file.
    """
    for file in files:
        with closing(_READERS[file.format](file, options)) as batches:
            yield from _with_damage(file, batches) if options.skip else batches


def _with_damage(
    file: InputFile, batches: Generator[Batch, None, None]
) -> Generator[Batch, None, None]:
    """Yield the batches, and the error that ends them early as a problem of the file."""
    try:
        yield from batches
    except DamagedError as error:
        reason: Reason = "cut short" if isinstance(error, CutShortError) else "damaged"
        problem = Problem(file.path, 0, reason, error.why or error.what, error.hint, "file")
        yield LineBatch(file.path, 1, b"", problems=(problem,))
