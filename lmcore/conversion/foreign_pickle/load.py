"""Pickles of other programs, read without running their code.

torch's `weights_only` unpickler builds tensors and plain containers only.  Checkpoints of Megatron
and its forks also hold objects of argument parsers and of these programs; names on an allow-list
become inert records, and every other name is an error that names it.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import CheckpointError
from lmcore.checkpoint.zip_checksum import damaged_record

__all__ = ["load_tensors", "only_allowed"]

_ZIP = b"PK\x03\x04"
"""Beginning of torch's zip format, whose index is at the end."""
_MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""Number at the beginning of torch's older format, a sequence of pickles."""
_CONTENT = "data.pkl"
"""Name of the record of torch's zip format that every file has."""
_LFS = b"version https://git-lfs"
_BEGIN, _SHOWN = 64, 40
_HINT = "lmcore runs no code of a checkpoint; convert it with the program that wrote it"


def load_tensors(path: Path, *, allowed: Iterable[Any] = (), compare: bool = True) -> Any:
    """Return the content of a file that `torch.save` wrote, with its tensors memory-mapped.

    Args:
        path: Path of the file.
        allowed: Classes besides tensors and plain containers that it may contain, and pairs of an
            inert class and the name that it replaces, `module.Name`.
        compare: True to compare torch's checksums, which reads the whole file.

    Raises:
        CheckpointError: The file is damaged, compressed, or names anything that is not allowed; it
            lacks values of a tensor; or `torch.save` did not write it.
    """
    try:
        _require_format(path)
        mapped = _is_zip(path, compare=compare)
        with only_allowed(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        _require_values(path, content)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"`{path}` is refused", why=_refused(error), hint=_HINT) from error
    except OSError as error:
        # torch takes a truncated archive for its older format, and looks for places it lacks.
        if (lacking := _lacking(path)) is not None:
            raise _damaged(path, lacking) from error
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{path}`", why=why) from error
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file fails in many ways, and none of them is a bug of ours.
        why = _lacking(path) or f"reading it failed: `{type(error).__name__}`"
        raise _damaged(path, why) from error
    return content


def _require_values(path: Path, content: Any) -> None:
    """Raise a `CheckpointError` for a tensor that does not have all of its values in the file.

    torch's unpickler also makes tensors of the device `meta`, sparse ones, and views that repeat
    one number over more memory than there is.
    """
    size = path.stat().st_size
    held, seen = [content], set()
    while held:
        value = held.pop()
        if isinstance(value, torch.Tensor):
            plain = value.layout is torch.strided and value.device.type == "cpu"
            if not plain or value.nbytes > size:
                shown = f"{list(value.shape)} of `{value.device}` and `{value.layout}`"
                raise _damaged(path, f"it lacks values of a tensor {shown}")
            continue
        if id(value) in seen:
            continue
        if isinstance(value, dict):
            inside: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple):
            inside = value
        else:
            inside = getattr(value, "__dict__", {}).values()  # of an inert record
        seen.add(id(value))
        held += inside


@contextmanager
def only_allowed(names: Iterable[Any]) -> Iterator[None]:
    """Let torch's unpickler make *names* and no others that this process has registered with it.

    Args:
        names: Classes, and pairs of a class and the name that it replaces.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(names))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _require_format(path: Path) -> None:
    """Raise a `CheckpointError` unless a file is empty or begins like a file of torch.

    An empty file is reported as damaged later.  torch's unpickler would take any bytes for a
    program, and fail at one of them.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        begin = stream.read(_BEGIN)
    if not begin or begin.startswith(_ZIP) or _MAGIC in begin:
        return
    if begin.startswith(_LFS):
        raise CheckpointError(
            f"`{path}` is not a file of `torch.save`",
            why="it is a pointer of Git LFS, which names the file that it replaces",
            hint="`git lfs pull` in the repository gets the file",
        )
    raise _other_format(path, f"it begins with {_shown(begin)}")


def _other_format(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` is not a file of `torch.save`",
        why=why,
        hint="it should hold tensors and settings as PyTorch saves them: copy the file again from "
        "the checkpoint, or convert it with the program that wrote it",
    )


def _shown(begin: bytes) -> str:
    """Return the beginning of a file for a message: its first line of text, or its first bytes."""
    line = begin.splitlines()[0].decode(errors="replace")[:_SHOWN]
    if line.isprintable() and line.strip() and "\N{REPLACEMENT CHARACTER}" not in line:
        return f"the text `{line}`"
    return f"the bytes `{begin[:8].hex(' ')}`"


def _is_zip(path: Path, *, compare: bool) -> bool:
    """Return True for torch's zip format, which can be mapped; False for the older one.

    Raises:
        CheckpointError: It is compressed, which could unpack to a thousand times its size, of
            another program, or a checksum in it is wrong.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise CheckpointError(f"`{path}` is refused", why="it is compressed")
        if not any(name.endswith(_CONTENT) for name in archive.namelist()):
            raise _other_format(path, f"it is a zip archive without `{_CONTENT}`")
        record = damaged_record(archive) if compare else None
    if record is not None:
        raise _damaged(path, f"the checksum of its record `{record}` is wrong")
    return True


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"`{path}` is damaged", why=why, hint="copy the file again")


def _lacking(path: Path) -> str | None:
    """Return what a file that cannot be read lacks; None if its end is there."""
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            begin = stream.read(len(_ZIP))
    except OSError:
        return None
    if not begin:
        return "it is empty"
    truncated = begin == _ZIP and not zipfile.is_zipfile(path)
    return "it is truncated: the index at its end is missing" if truncated else None


def _refused(error: pickle.UnpicklingError) -> str:
    """Return the reason without torch's advice to load without the restriction."""
    text = str(error)
    for line in text.splitlines():
        if "GLOBAL" in line:
            return f"it names {line.split('GLOBAL', 1)[1].split(' was not', 1)[0].strip()}"
    return "it contains more than tensors and plain values"
