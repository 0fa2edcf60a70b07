"""Files of fine-tuned tasks: where they are, and the JSON lines that a training run reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import DataError
from lmcore.base.missing_path import missing_path_hint
from lmcore.evaluation.finetune.record import LabelledRow, Part, TunedTask

__all__ = [
    "TaskFile",
    "checksum_of",
    "find_part",
    "is_labelled",
    "labelled_file",
    "name_of",
    "read_file",
    "rows_of",
    "write_rows",
]


@dataclass(frozen=True)
class TaskFile:
    """File, or folder, of a task that was read.

    Attributes:
        path: The file or folder.
        rows: Its rows, at least one.
    """

    path: Path
    rows: Sequence[LabelledRow]

    @property
    def is_labelled(self) -> bool:
        """True if its rows have labels."""
        return self.rows[0].label is not None


def find_part(task: TunedTask, data: Path, part: Part, *, needed: bool = True) -> list[Path]:
    """Return the files, or folders, of a part of a task.

    Args:
        task: The task.
        data: Directory with the data of tasks, or with the files of this one.
        part: The part.
        needed: True if the part must be there.

    Raises:
        DataError: It must, and is not.
    """
    found: list[Path] = []
    for patterns in task.files[part]:
        for pattern in patterns:
            places = sorted(data.glob(pattern))
            if places:
                found += places
                break
    if found or not needed:
        return found
    patterns = [one for several in task.files[part] for one in several]
    listed = ", ".join(f"`{pattern}`" for pattern in patterns)
    raise DataError(
        f"`{data}` has no {_PARTS[part]} of the task `{task.name}`"
        if data.is_dir()
        else f"there is no directory `{data}`",
        why=f"looked for {listed}",
        hint=f"they are from {task.release}; or give paths by `--{part}-data`",
    )


_PARTS: dict[Part, str] = {
    "train": "training data",
    "valid": "data of validation",
    "test": "test data",
}


def name_of(path: Path) -> str:
    """Return the name of a file, or the last two of a folder, for tables.

    Args:
        path: The file or folder.
    """
    return f"{path.parent.name}/{path.name}" if path.is_dir() else path.name


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; of a folder, of the names and bytes of its `.txt`.

    Args:
        path: The file or folder.
    """
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.txt")):
        # A name has no zero byte, and a checksum one length: two folders have two contents.
        digest.update(bytes(file.relative_to(path)) + b"\0" + checksum_of(file).encode())
    return digest.hexdigest()


def rows_of(task: TunedTask, path: Path, limit: int | None = None) -> list[LabelledRow]:
    """Return the rows of a file or folder.

    Args:
        task: The task.
        path: The file or folder.
        limit: Number of rows that are taken from the beginning; None: all.

    Raises:
        DataError: It is not there, has another layout or no rows.
    """
    if not path.exists():
        raise DataError(f"there is no `{path}`", hint=missing_path_hint(path))
    found: list[LabelledRow] = []
    for row in task.rows(path):
        if limit is not None and len(found) == limit:
            break
        found.append(row)
    if not found:
        why = "it has a header alone" if path.is_file() else "no `.txt` file in it has a question"
        raise DataError(f"`{path}` has no rows of the task `{task.name}`", why=why)
    return found


def read_file(task: TunedTask, path: Path, limit: int | None = None) -> TaskFile:
    """Return a file or folder with its rows.

    Args:
        task, path, limit: See `rows_of`.

    Raises:
        DataError: It is not there, has another layout or no rows.
    """
    return TaskFile(path, rows_of(task, path, limit))


def labelled_file(task: TunedTask, path: Path) -> TaskFile:
    """Return a file or folder that a model is trained on, or chosen by, with its rows.

    Args:
        task: The task.
        path: The file or folder.

    Raises:
        DataError: It is not there, has another layout, no rows or no labels.
    """
    found = read_file(task, path)
    if not found.is_labelled:
        raise DataError(
            f"`{path}` has no labels",
            why=f"its header names no column `{task.label}`, the labels of the task `{task.name}`",
            hint="train and validate on files with labels; GLUE's test files have none",
        )
    return found


def is_labelled(task: TunedTask, path: Path) -> bool:
    """Return True if the first row of a file has a label, or there is none.

    Args:
        task: The task.
        path: File or folder.
    """
    first = next(task.rows(path), None)
    return first is None or first.label is not None


def write_rows(files: Iterable[TaskFile], target: Path) -> int:
    """Write the rows of files as JSON lines, and return their number.

    Args:
        files: Files or folders with labels; taken as they are needed.
        target: The file to write, whose folder is there.

    Raises:
        DataError: A row has no text.
    """
    count = 0
    with AtomicFile(target) as stream:
        for file in files:
            for line in _lines(file):
                stream.write(line)
                count += 1
    return count


def _lines(file: TaskFile) -> Iterator[bytes]:
    for row in file.rows:
        if not any(text.strip() for text in row.texts):
            raise DataError(f"{row.where} has no text", hint="leave the row out")
        values: dict[str, object] = dict(zip(("text", "text2"), row.texts, strict=False))
        values |= {"choices": list(row.choices)} if row.choices else {}
        yield json.dumps({**values, "label": row.label}).encode() + b"\n"
