"""Text columns of Parquet and Arrow, with their checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import MissingPackageError
from lmcore.data.input.compression import DamagedError
from lmcore.data.input.document import InputDocument, key_missing
from lmcore.data.input.options import InputOptions
from lmcore.data.input.problem import BadDocument, too_long

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["arrow_errors", "documents_of", "require_columns", "require_package"]

_SKIP = "or skip such rows with `--on-error skip`"


def require_package(needed_for: str) -> None:
    """Raise `MissingPackageError` if `pyarrow` is not installed."""
    try:
        import pyarrow as pa  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "pyarrow", needed_for=needed_for, install="pip install pyarrow"
        ) from None


@contextmanager
def arrow_errors(source: str) -> Iterator[None]:
    """Convert exceptions of `pyarrow` for bad data into `DamagedError`."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        why = str(error).partition("\n")[0]
        raise DamagedError(
            f"`{source}` is damaged", why=why, hint="copy or download it again"
        ) from None


def require_columns(schema: pa.Schema, options: InputOptions) -> None:
    """Raise `BadDocument` unless each key is exactly one text column."""
    import pyarrow as pa

    for key in options.keys:
        flag = options.key_flag(key)
        count = schema.names.count(key)
        if not count:
            raise key_missing(key, schema.names, flag, called="its columns")
        if count > 1:
            raise BadDocument("key missing", f"{count} columns have the name `{key}`")
        held = schema.field(key).type
        inner = held.value_type if pa.types.is_dictionary(held) else held
        is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(holds(inner) for holds in is_text):
            detail = f"the column `{key}` has the type {held}"
            raise BadDocument("not a string", detail, f"give a text column with `{flag}`")


def documents_of(
    batch: pa.RecordBatch, first: int, options: InputOptions
) -> Iterator[InputDocument]:
    """Yield the rows of *batch*, numbered from *first*."""
    columns = [batch.column(key) for key in options.keys]
    for number in range(batch.num_rows):
        size, texts = 0, []
        bad: BadDocument | None = None
        for key, column in zip(options.keys, columns, strict=True):
            try:
                raw = _bytes(key, column[number], options.max_document_bytes)
                size += len(raw)
                texts.append(_decoded(raw))
            except BadDocument as problem:
                bad = bad or problem
        yield InputDocument(first + number, size, bad or tuple(texts))


def _bytes(key: str, value: Any, bound: int) -> memoryview:
    """Return the bytes of a value without a copy; they may be invalid UTF-8."""
    import pyarrow as pa

    if isinstance(value, pa.DictionaryScalar):
        value = value.value
    if not value.is_valid:
        raise BadDocument("not a string", f"`{key}` is null")
    raw = memoryview(value.as_buffer())
    if len(raw) > bound:
        raise too_long(bound)
    return raw


def _decoded(raw: memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the text is 0x{raw[error.start]:02x}"
        hint = f"convert the text to UTF-8, {_SKIP}"
        raise BadDocument("not UTF-8", detail, hint) from None
