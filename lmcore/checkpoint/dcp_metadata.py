"""Reads `.metadata`, the index of torch's distributed checkpoint format, without trusting it.

The file is a pickle, and torch unpickles it without restriction: whoever wrote it chooses what
runs.  Here only the names that such an index consists of are known, and each of them becomes an
inert record, never torch's own class; the records are then checked field by field against the
manifest and the files on disk, and what passed is all that a reader gets.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lmcore.checkpoint.chunks import Box, inside, tile
from lmcore.checkpoint.manifest import Manifest
from lmcore.errors import CheckpointError

__all__ = ["METADATA_NAME", "Chunk", "dtype_name", "dtype_of", "read_metadata"]

METADATA_NAME = ".metadata"
# About 400 bytes a tensor: room for hundreds of thousands of them.
MAX_METADATA_BYTES = 128 * 1024 * 1024

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_STORAGE_MODULE, "_StorageInfo"),
}
_MEMORY_FORMATS = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"}
_DTYPES = {
    dtype_name: value
    for dtype_name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{dtype_name}"
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return how the manifest names *dtype*: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` names."""
    return _DTYPES[name]


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor: which, and the bytes of a file where it is."""

    name: str
    box: Box
    file: str
    offset: int
    length: int


def read_metadata(checkpoint: Path, manifest: Manifest) -> dict[str, list[Chunk]]:
    """Return the parts of each tensor in *checkpoint*, every one checked against *manifest*.

    Raises:
        CheckpointError: it names anything outside the format, tensors other than the manifest's,
            or bytes outside the manifest's files.
    """
    path = checkpoint / METADATA_NAME
    if METADATA_NAME not in manifest.files:
        raise CheckpointError(f"checkpoint `{checkpoint}` has no `{METADATA_NAME}`")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_METADATA_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`", why=str(error)) from error
    if len(content) > MAX_METADATA_BYTES:
        raise CheckpointError(f"`{path}` is larger than {MAX_METADATA_BYTES} bytes")
    try:
        record = _IndexUnpickler(io.BytesIO(content)).load()
        return _Converter(manifest).index(record)
    except Exception as error:
        # A damaged pickle fails in many ways, and none of them is a bug of ours.
        raise CheckpointError(
            f"`{path}` is not an index that lmcore accepts",
            why=str(error) or type(error).__name__,
            hint="load checkpoints only from people you trust; use an earlier one or a copy",
        ) from error


class _Record:
    """The state of one pickled object, kept as it was stored."""

    kind = ""
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _as_layout(name: object) -> object:
    return name


def _as_memory_format(code: object) -> object:
    return code


def _memory_format_member(owner: object, name: object) -> object:
    """Stand in for `getattr`, which Python 3.11.0 to 3.11.3 pickle an enum's member with."""
    if owner is not _as_memory_format or name not in _MEMORY_FORMATS:
        raise pickle.UnpicklingError(f"it reads the attribute `{name!s:.80}`, refused")
    return name


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        # New classes for every file: whatever a pickle does to them ends with it.
        self._classes = {
            (module, name): type(name, (_Record,), {"kind": name}) for module, name in _RECORDS
        }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = (module_name, global_name)
        if key in self._classes:
            return self._classes[key]
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        match key:
            case ("torch", "Size"):
                return tuple
            case ("torch.serialization", "_get_layout"):
                return _as_layout
            case (_, "_MEM_FORMAT_ENCODING") if module_name == _METADATA_MODULE:
                return _as_memory_format
            case ("builtins", "getattr"):
                return _memory_format_member
        raise pickle.UnpicklingError(f"it names `{module_name}.{global_name}`, refused")


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    length: int


class _Converter:
    """Takes from records what a reader needs, refusing all that a save of ours never writes."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._sizes = {name: entry.size for name, entry in manifest.files.items()}

    def index(self, record: object) -> dict[str, list[Chunk]]:
        fields = _fields(record, "Metadata")
        stated = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        if stated.keys() != self._tensors.keys():
            odd = sorted(str(name)[:80] for name in stated.keys() ^ self._tensors.keys())
            _refuse(f"its tensors are not those of the manifest: {', '.join(odd[:10])}")
        places = self._places(_mapping(fields.get("storage_data"), "storage_data"))
        found: dict[str, list[Chunk]] = {}
        for name, entry in stated.items():
            found[name] = []
            for box in self._boxes(name, entry):
                place = places.pop((name, box.offset), None)
                if place is None:
                    _refuse(f"tensor `{name}` has a part that is stored nowhere")
                found[name].append(Chunk(name, box, place.file, place.offset, place.length))
        if places:
            _refuse(f"it stores {len(places)} parts that belong to no tensor")
        return found

    def _boxes(self, name: str, record: object) -> list[Box]:
        fields = _fields(record, "TensorStorageMetadata")
        shape = _sizes(fields.get("size"))
        properties = _state(fields.get("properties"), "TensorProperties")
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        expected = self._tensors[name]
        if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != expected.dtype:
            _refuse(f"the dtype of tensor `{name}` is not the manifest's")
        if shape != expected.shape:
            _refuse(f"the shape of tensor `{name}` is not the manifest's")
        stored = fields.get("chunks")
        if not isinstance(stored, list):
            _refuse(f"the parts of tensor `{name}` are not a list")
        boxes = [self._box(name, shape, chunk) for chunk in stored]
        if not tile(boxes, shape):
            _refuse(f"the parts of tensor `{name}` do not make the whole")
        return boxes

    def _box(self, name: str, shape: tuple[int, ...], record: object) -> Box:
        fields = _fields(record, "ChunkStorageMetadata")
        box = Box(_sizes(fields.get("offsets")), _sizes(fields.get("sizes")))
        if not inside(box, shape):
            _refuse(f"a part of tensor `{name}` lies outside it")
        return box

    def _places(self, stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], _Place]:
        places: dict[tuple[str, tuple[int, ...]], _Place] = {}
        for index, record in stored.items():
            fields = _fields(index, "MetadataIndex")
            name = fields.get("fqn")
            if not isinstance(name, str) or name not in self._tensors:
                _refuse("a stored part names a tensor that the manifest does not have")
            key = (name, _sizes(fields.get("offset")))
            if key in places:
                _refuse(f"a part of tensor `{name}` is stored twice")
            places[key] = self._place(name, _fields(record, "_StorageInfo"))
        return places

    def _place(self, name: str, fields: Mapping[str, Any]) -> _Place:
        file = fields.get("relative_path")
        if not isinstance(file, str) or file not in self._sizes or file == METADATA_NAME:
            _refuse(f"tensor `{name}` is stored in `{str(file)[:80]}`, not a file of the manifest")
        offset, length = _sizes((fields.get("offset"), fields.get("length")))
        if offset + length > self._sizes[file]:
            _refuse(f"tensor `{name}` is stored beyond the end of `{file}`")
        if fields.get("transform_descriptors"):
            _refuse(f"tensor `{name}` is stored through a transformation")
        return _Place(file, offset, length)


def _refuse(why: str) -> NoReturn:
    raise pickle.UnpicklingError(why)


def _state(record: object, kind: str) -> Any:
    if not isinstance(record, _Record) or record.kind != kind:
        found = record.kind if isinstance(record, _Record) else type(record).__name__
        _refuse(f"`{found}` stands where `{kind}` belongs")
    return record.state


def _fields(record: object, kind: str) -> Mapping[str, Any]:
    return _mapping(_state(record, kind), kind)


def _mapping(value: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        _refuse(f"`{name}` is not a mapping")
    return value


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    ):
        _refuse("a shape or position is not made of counts")
    return value
