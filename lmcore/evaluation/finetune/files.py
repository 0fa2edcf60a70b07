"""Files of fine-tuned tasks: where they are, and the JSON lines that a training run reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import DataError
from lmcore.evaluation.finetune.record import LabelledRow, Part, TunedTask

__all__ = ["checksum_of", "find_part", "name_of", "rows_of", "write_rows"]


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
        raise DataError(f"there is no `{path}`", hint="check the path")
    found: list[LabelledRow] = []
    for row in task.rows(path):
        if limit is not None and len(found) == limit:
            break
        found.append(row)
    if not found:
        why = "it has a header alone" if path.is_file() else "no `.txt` file in it has a question"
        raise DataError(f"`{path}` has no rows of the task `{task.name}`", why=why)
    return found


def write_rows(task: TunedTask, paths: Sequence[Path], target: Path) -> int:
    """Write the rows of files as JSON lines, and return their number.

    Args:
        task: The task.
        paths: The files or folders.
        target: The file to write, whose folder is there.

    Raises:
        DataError: A file has another layout, no rows or no labels.
    """
    count = 0
    with AtomicFile(target) as stream:
        for path in paths:
            for line in _lines(task, path):
                stream.write(line)
                count += 1
    return count


def _lines(task: TunedTask, path: Path) -> Iterator[bytes]:
    for row in rows_of(task, path):
        if row.label is None:
            raise DataError(
                f"`{path}` has no labels",
                why="its header names no column of them",
                hint="train and validate on files with labels; GLUE's test files have none",
            )
        if not any(text.strip() for text in row.texts):
            raise DataError(f"{row.where} has no text", hint="leave the row out")
        values: dict[str, object] = dict(zip(("text", "text2"), row.texts, strict=False))
        values |= {"choices": list(row.choices)} if row.choices else {}
        yield json.dumps({**values, "label": row.label}).encode() + b"\n"
