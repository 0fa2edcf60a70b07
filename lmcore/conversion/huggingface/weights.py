"""Weight files of a Hugging Face directory: safetensors or torch pickles, in one file or several.

Tensors are read one at a time from memory-mapped files.  Pickles are read with torch's
`weights_only`, which runs none of their code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmcore.base.bounded_file import open_regular, read_bounded_file
from lmcore.base.errors import CheckpointError
from lmcore.conversion.foreign_pickle.load import load_tensors
from lmcore.conversion.huggingface.directory import WEIGHT_FILES

__all__ = ["StoredTensor", "WeightFiles", "Weights"]

_MAX_INDEX_BYTES = 64 * 1024 * 1024
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_HINT = "download or copy the file again"


class _File(Protocol):
    """One open weight file."""

    def tensors(self) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of a tensor in a weight file; the dtype is None if it holds no floats."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    file: Path


class Weights(Protocol):
    """All tensors of a model, by name; see `WeightFiles` for a Hugging Face directory."""

    tensors: dict[str, StoredTensor]

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the CPU."""
        ...


class WeightFiles:
    """All tensors of a directory, by name.

    Attributes:
        tensors: Dtype, shape and file of each tensor.
    """

    def __init__(self, directory: Path, *, compare: bool = True) -> None:
        """Open the files and read their headers.

        Args:
            directory: Directory of the model.
            compare: True to compare the checksums of pickles; safetensors have none.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, _File] = {}
        for path in _paths(directory):
            pickled = path.suffix == ".bin"
            opened: _File = _Pickle(path, compare=compare) if pickled else _Safetensors(path)
            self._files[path] = opened
            for name, (dtype, shape) in opened.tensors().items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"`{directory}` has tensor `{name}` twice",
                        why=f"in `{self.tensors[name].file.name}` and in `{path.name}`",
                    )
                self.tensors[name] = StoredTensor(dtype, shape, path)

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the CPU.

        Raises:
            CheckpointError: The file is damaged.
        """
        return self._files[self.tensors[name].file].read(name)


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _require_regular(path)
            self._open = safe_open(str(path), framework="pt", device="cpu")
            self._open.__enter__()  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error

    def tensors(self) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        found = {}
        for name in self._open.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            part = self._open.get_slice(name)  # type: ignore[no-untyped-call]
            found[name] = (_DTYPES.get(part.get_dtype()), tuple(part.get_shape()))
        return found

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._open.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise _damaged(self.path, error) from error
        return tensor


class _Pickle:
    def __init__(self, path: Path, *, compare: bool) -> None:
        self.path = path
        content = load_tensors(path, compare=compare)
        if not isinstance(content, dict):
            raise _damaged(path, "it is no mapping of tensors")
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in content.items():
            if not isinstance(name, str) or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
                raise _damaged(path, f"`{name!s:.80}` is no tensor")
            self._tensors[name] = tensor.detach()

    def tensors(self) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        return {
            name: (
                tensor.dtype if tensor.dtype in _DTYPES.values() else None,
                tuple(tensor.shape),
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _paths(directory: Path) -> Iterator[Path]:
    for single, index in WEIGHT_FILES:
        if (directory / single).is_file():
            yield directory / single
            return
        if (directory / index).is_file():
            yield from _indexed(directory / index)
            return
    raise CheckpointError(
        f"`{directory}` has no weight files",
        why=f"looked for {', '.join(f'`{name}`' for names in WEIGHT_FILES for name in names)}",
        hint=_HINT,
    )


def _indexed(path: Path) -> list[Path]:
    """Return the files that the index *path* names."""
    try:
        index: Any = json.loads(read_bounded_file(path, _MAX_INDEX_BYTES))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from error
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise _damaged(path, f"`{name!s:.80}` is no file beside it")
        try:
            found = (path.parent / name).is_file()
        except OSError as error:  # a name that no file can have
            raise _damaged(path, error) from error
        if not found:
            raise CheckpointError(
                f"`{path.parent}` is not complete",
                why=f"`{path.name}` names `{name}`, which is missing",
                hint=_HINT,
            )
    return [path.parent / name for name in names]


def _require_regular(path: Path) -> None:
    os.close(open_regular(path))


def _damaged(path: Path, reason: object) -> CheckpointError:
    why = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return CheckpointError(f"`{path}` is damaged", why=why, hint=_HINT)
