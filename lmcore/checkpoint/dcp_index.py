"""Writes `.metadata`, the index of torch's distributed checkpoint format, without torch's classes.

The index is a pickle of dataclasses in `torch.distributed.checkpoint`, whose import takes as long
as the rest of torch.  A pickle names the class of each object, so that an object with the
same class name and state serves as well: `torch.distributed.checkpoint` reads the file as its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.checkpoint.dcp_metadata import METADATA_MODULE, METADATA_NAME, STORAGE_MODULE, dtype_of
from lmcore.checkpoint.files.synced_file import write_durably
from lmcore.checkpoint.manifest import FileEntry, TensorEntry

if TYPE_CHECKING:
    from lmcore.checkpoint.dcp_writer import ByteRange

__all__ = ["write_index"]

_ClassName = tuple[str, str]
"""Module and name of a class that the reader imports."""

_BYTES = (METADATA_MODULE, "BytesStorageMetadata")
_CHUNK = (METADATA_MODULE, "ChunkStorageMetadata")
_INDEX = (METADATA_MODULE, "MetadataIndex")
_MEMORY_FORMAT = (METADATA_MODULE, "_MEM_FORMAT_ENCODING")
_METADATA = (METADATA_MODULE, "Metadata")
_PROPERTIES = (METADATA_MODULE, "TensorProperties")
_STORAGE_INFO = (STORAGE_MODULE, "_StorageInfo")
_STORAGE_META = (METADATA_MODULE, "StorageMeta")
_TENSOR = (METADATA_MODULE, "TensorStorageMetadata")

_CONTIGUOUS = 0
"""Value of the memory format's enum for contiguous tensors."""


@dataclass(frozen=True, eq=False)
class _Object:
    """Object of a class known by name, with the state that its pickle holds.

    With *called*, the object is the result of calling the class with the arguments in `state`.
    """

    kind: _ClassName
    state: Any
    called: bool = False


def write_index(
    directory: Path,
    tensors: Mapping[str, TensorEntry],
    stored: Iterable[tuple[str, ChunkBounds, ByteRange]],
    objects: Mapping[str, ByteRange] = MappingProxyType({}),
) -> FileEntry:
    """Write and sync the index of a checkpoint; return the file's size and checksum.

    Args:
        directory: Directory of the checkpoint.
        tensors: Dtype and shape of each tensor, by name.
        stored: Tensor name, chunk and byte range of each stored chunk, in any order.
        objects: Byte range of each object that is not a tensor, as others have them, by name.

    Raises:
        OSError: The write failed.
    """
    by_name: dict[str, list[tuple[ChunkBounds, ByteRange]]] = {name: [] for name in tensors}
    for name, chunk, byte_range in stored:
        by_name[name].append((chunk, byte_range))
    entries: dict[str, _Object] = {}
    storage: dict[_Object, _Object] = {}
    for name, tensor in tensors.items():
        chunks = []
        parts = sorted(by_name[name], key=lambda part: part[0])
        for number, (bounds, found) in enumerate(parts):
            offset = torch.Size(bounds.offset)
            chunks.append(_Object(_CHUNK, {"offsets": offset, "sizes": torch.Size(bounds.size)}))
            key = _Object(_INDEX, {"fqn": name, "index": number, "offset": offset})
            state = {"relative_path": found.file, "offset": found.offset, "length": found.length}
            storage[key] = _Object(_STORAGE_INFO, state)
        contiguous = _Object(_MEMORY_FORMAT, (_CONTIGUOUS,), called=True)
        properties = (dtype_of(tensor.dtype), torch.strided, False, contiguous, False)
        entries[name] = _Object(
            _TENSOR,
            {
                "properties": _Object(_PROPERTIES, properties),
                "size": torch.Size(tensor.shape),
                "chunks": chunks,
            },
        )
    for name, found in objects.items():
        entries[name] = _Object(_BYTES, {})
        state = {"relative_path": found.file, "offset": found.offset, "length": found.length}
        storage[_Object(_INDEX, {"fqn": name, "index": None, "offset": None})] = _Object(
            _STORAGE_INFO, state
        )
    # torch would write the path and a random number into the storage's metadata.
    empty: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    metadata = {
        "state_dict_metadata": entries,
        "planner_data": {name: (name,) for name in entries},
        "storage_data": storage,
        "storage_meta": _Object(_STORAGE_META, empty),
        "version": "1.0.0",
    }
    return write_durably(directory / METADATA_NAME, _pickled(_Object(_METADATA, metadata)))


def _pickled(value: object) -> bytes:
    """Return the pickle of a value made of objects, containers and plain values."""
    writer = _Writer()
    writer.write(value)
    return pickle.PROTO + b"\x02" + b"".join(writer.parts) + pickle.STOP


class _Writer:
    """Writer of pickle opcodes, which remembers the class names it has written."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._names: dict[_ClassName, int] = {}

    def write(self, value: object) -> None:
        """Append the opcodes that make *value*."""
        add = self.parts.append
        if isinstance(value, _Object):
            self._write_name(value.kind)
            if value.called:
                self.write(value.state)
                add(pickle.REDUCE)
            else:
                add(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
                self.write(value.state)
                add(pickle.BUILD)
        elif isinstance(value, dict) and _holds_objects(value):
            add(pickle.EMPTY_DICT + pickle.MARK)
            for key, entry in value.items():
                self.write(key)
                self.write(entry)
            add(pickle.SETITEMS)
        elif isinstance(value, list) and _holds_objects(value):
            add(pickle.EMPTY_LIST + pickle.MARK)
            for entry in value:
                self.write(entry)
            add(pickle.APPENDS)
        elif isinstance(value, tuple) and _holds_objects(value):
            add(pickle.MARK)
            for entry in value:
                self.write(entry)
            add(pickle.TUPLE)
        else:
            add(_plain(value))

    def _write_name(self, name: _ClassName) -> None:
        number = self._names.get(name)
        if number is not None:
            self.parts.append(pickle.BINGET + bytes([number]))
            return
        number = self._names[name] = len(self._names)
        module, attribute = name[0].encode(), name[1].encode()
        self.parts.append(pickle.GLOBAL + module + b"\n" + attribute + b"\n")
        self.parts.append(pickle.BINPUT + bytes([number]))


def _holds_objects(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(value, (_Object, list, dict)) for value in values)


def _plain(value: object) -> bytes:
    """Return the opcodes of a value without objects, without memo entries."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]
