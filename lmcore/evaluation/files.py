"""Files of evaluation tasks: where they are, and their rows with the place of each for messages."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import DataError, LmcoreError, counted, unreadable
from lmcore.base.missing_path import missing_path_hint
from lmcore.data.input.compression import open_text
from lmcore.evaluation.task import Choices, Continued, Example, Streamed, Task

__all__ = [
    "Row",
    "examples_of",
    "find_files",
    "iter_examples",
    "json_rows",
    "read_lines",
    "read_pieces",
    "read_text",
]

_LONGEST = 1 << 24
"""Most bytes of a line."""
_SHOWN = 60
_BLOCK = 1 << 16
"""Bytes of a text that are read at once."""


@dataclass(frozen=True)
class Row:
    """JSON object of a file.

    Attributes:
        values: Its values.
        where: File and line, for messages.
    """

    values: Mapping[str, Any]
    where: str

    def text(self, *names: str) -> str:
        """Return the text of the first field that the row has.

        Raises:
            DataError: It has none of them, or it is no text.
        """
        return str(self._of(names, str, "a text"))

    def number(self, *names: str) -> int:
        """Return the whole number of the first field that the row has, which may be a text.

        Raises:
            DataError: It has none of them, or it is no whole number.
        """
        value = self._of(names, (int, str), "a whole number")
        try:
            return int(value)
        except ValueError as error:
            raise self.wrong(names[0], value, "a whole number") from error

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return the list of texts of the first field that the row has.

        Raises:
            DataError: It has none of them, or it is no list of texts.
        """
        value = self._of(names, (list, tuple), "a list of texts")
        if not value or not all(isinstance(one, str) for one in value):
            raise self.wrong(names[0], value, "a list of texts")
        return tuple(value)

    def row(self, name: str) -> Row:
        """Return the object in a field.

        Raises:
            DataError: There is none.
        """
        return Row(self._of((name,), dict, "an object"), self.where)

    def rows(self, name: str) -> list[Row]:
        """Return the objects of a list in a field.

        Raises:
            DataError: It is no list of objects.
        """
        value = self._of((name,), list, "a list of objects")
        if not value or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, value, "a list of objects")
        return [Row(one, self.where) for one in value]

    def chosen(self, gold: int, choices: Sequence[str]) -> int:
        """Return the number of the right choice, if there is a choice of that number.

        Raises:
            DataError: There is none.
        """
        if 0 <= gold < len(choices):
            return gold
        raise DataError(
            f"{self.where} has a label outside the set",
            why=f"it is choice {gold} of {counted(len(choices), 'choice')}, counted from 0",
        )

    def wrong(self, name: str, value: object, wanted: str) -> DataError:
        """Return the error of a field whose value is not what the task needs."""
        return DataError(
            f"the field `{name}` of {self.where} is not {wanted}",
            why=f"it is `{value!s:.{_SHOWN}}`",
        )

    def _of(self, names: Sequence[str], kind: type | tuple[type, ...], wanted: str) -> Any:
        name = next((name for name in names if name in self.values), None)
        if name is None:
            fields = ", ".join(f"`{key!s:.{_SHOWN}}`" for key in list(self.values)[:10]) or "none"
            raise DataError(
                f"{self.where} has no field `{names[0]}`",
                why=f"its fields: {fields}",
                hint="is it a file of another task, or of another layout?",
            )
        value = self.values[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(name, value, wanted)
        return value


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, compressed or not; empty lines are left out.

    Args:
        path: The file.

    Raises:
        DataError: It cannot be read, or a line, which is named, is no JSON object.
    """
    with open_text(str(path)) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), b""), 1):
            if not line.strip():
                continue
            where = f"line {number} of `{path}`"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} is not JSON", why=f"it begins with `{line[:_SHOWN]!r}`"
                ) from error
            if not isinstance(values, dict):
                raise DataError(f"{where} is no JSON object", why=f"it is `{values!s:.{_SHOWN}}`")
            yield Row(values, where)


def read_text(path: Path, limit: int = 1 << 32) -> str:
    """Return the text of a file, compressed or not.

    Args:
        path: The file, in UTF-8.
        limit: Most bytes that are read.

    Raises:
        DataError: It cannot be read, is larger, or is no UTF-8.
    """
    with open_text(str(path)) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"`{path}` is too large", why=f"at most {limit:,} bytes are read")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"`{path}` is not UTF-8",
        why=unreadable(error),
        hint="convert it, for example with `iconv`",
    )


def read_pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file, compressed or not, in pieces of a bounded size.

    Args:
        path: The file, in UTF-8.

    Raises:
        DataError: It cannot be read, or is no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_text(str(path)) as stream:
        try:
            while block := stream.read(_BLOCK):
                if text := decoder.decode(block):
                    yield text
            if text := decoder.decode(b"", final=True):
                yield text
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, compressed or not, with their ends; a very long one divided.

    Args:
        path: The file, in UTF-8.

    Raises:
        DataError: It cannot be read, or is no UTF-8.
    """
    held = ""
    for piece in read_pieces(path):
        *lines, held = (held + piece).splitlines(keepends=True)
        yield from lines
        if len(held) > _LONGEST:
            yield held
            held = ""
    if held:
        yield held


def find_files(task: Task, data: Path, flag: str = "--task") -> list[Path]:
    """Return the files of a task.

    Args:
        task: The task.
        data: Directory with the data of tasks, or the file of this one.
        flag: Flag of the names of tasks, for the message.

    Raises:
        DataError: There are none; the error names the files of the release.
    """
    if data.is_file():
        return [data]
    if not task.files and data.is_dir():
        raise DataError(f"`{data}` is a directory", hint="give the path of a file")
    if not task.files:
        hint = missing_path_hint(data, "give the path of a file")
        raise DataError(f"there is no file `{data}`", hint=hint)
    for pattern in task.files:
        found = sorted(one for one in data.glob(pattern) if one.is_file())
        if found:
            return found
    listed = ", ".join(f"`{pattern}`" for pattern in task.files)
    raise DataError(
        f"`{data}` has no file of the task `{task.name}`"
        if data.is_dir()
        else f"there is no `{data}`",
        why=f"looked for {listed}",
        hint=missing_path_hint(
            data,
            f"they are from {task.release}; give the directory that has them, or the file: "
            f"`{flag}-data {task.name}=FILE`",
        ),
    )


def examples_of(task: Task, files: Sequence[Path]) -> list[Example]:
    """Return the examples of the files of a task.

    Args:
        task: The task.
        files: Its files.

    Raises:
        DataError: A file cannot be read, has another layout, or there are no examples.
    """
    return list(iter_examples(task, files))


def iter_examples(task: Task, files: Sequence[Path]) -> Iterator[Example]:
    """Yield the examples of the files of a task, as they are read.

    Args:
        task: The task.
        files: Its files.

    Raises:
        DataError: A file cannot be read, has another layout, or there are no examples.
    """
    count = 0
    for path in files:
        examples = iter(task.examples(path))
        while True:
            try:
                example = next(examples, None)
            except LmcoreError:
                raise
            except Exception as error:
                raise DataError(
                    f"the task `{task.name}` fails after {counted(count, 'example')}",
                    why=f"{type(error).__name__}: {error}",
                    hint="look at its function `examples`",
                ) from error
            if example is None:
                break
            count += 1
            _require_example(example, f"example {count} of the task `{task.name}`")
            yield example
    if not count:
        listed = ", ".join(f"`{path}`" for path in files)
        raise DataError(f"{listed} has no examples of the task `{task.name}`", why="it is empty")


def _require_example(example: object, where: str) -> None:
    """Raise a `DataError` if a task, which a user may have written, made something else."""
    if not isinstance(example, Streamed | Continued | Choices):
        raise DataError(
            f"{where} is no example",
            why=f"it is a `{type(example).__name__}`",
            hint="make a `Text`, a `Continued` or a `Choices`",
        )
    if not isinstance(example, Choices):
        return
    count = len(example.choices)
    if not 0 <= example.gold < count:
        raise DataError(
            f"{where} has a label outside the set",
            why=f"it is choice {example.gold} of {counted(count, 'choice')}, counted from 0",
        )
    if len(example.contexts) not in {1, count}:
        raise DataError(
            f"{where} has {counted(len(example.contexts), 'context')} "
            f"for {counted(count, 'choice')}",
            hint="give one context, or one for each choice",
        )
