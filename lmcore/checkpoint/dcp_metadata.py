"""Reads `.metadata`, the index of torch's distributed checkpoint format, without trusting it.

The file is a pickle, and torch unpickles it without restriction: its author chooses the code that
runs.  Here only the names in such an index are known, and each of them becomes an inert record,
never torch's own class; the records are then checked field by field against the manifest and the
files on disk, and only the checked result is returned.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointError, counted
from lmcore.checkpoint.chunks import ChunkBounds, is_inside, is_partition
from lmcore.checkpoint.manifest import Manifest, TensorEntry
from lmcore.contract.dtype import dtype_name

__all__ = [
    "METADATA_MODULE",
    "METADATA_NAME",
    "STORAGE_MODULE",
    "ForeignIndex",
    "StoredChunk",
    "StoredObject",
    "dtype_of",
    "read_foreign_metadata",
    "read_metadata",
]

METADATA_NAME = ".metadata"
# About 400 bytes a tensor: room for hundreds of thousands of them.
MAX_METADATA_BYTES = 128 * 1024 * 1024

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    (METADATA_MODULE, "ChunkStorageMetadata"),
    (METADATA_MODULE, "Metadata"),
    (METADATA_MODULE, "MetadataIndex"),
    (METADATA_MODULE, "StorageMeta"),
    (METADATA_MODULE, "TensorProperties"),
    (METADATA_MODULE, "TensorStorageMetadata"),
    (STORAGE_MODULE, "_StorageInfo"),
}
_BYTES = "BytesStorageMetadata"
_SHOWN_FILES, _SHOWN_CHARACTERS = 10, 80
_PLAN_PACKAGE = "torch.distributed.checkpoint."
_MEMORY_FORMATS = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"}
_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and dtype_name(value) == name
}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a `dtype_name`."""
    return _DTYPES[name]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in a checkpoint.

    Attributes:
        name: Name of the tensor.
        bounds: Bounds in the tensor.
        file: Name of the file.
        offset: First byte in the file.
        length: Number of bytes.
    """

    name: str
    bounds: ChunkBounds
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredObject:
    """An object that is not a tensor.

    Attributes:
        file: Name of the file.
        offset: First byte in the file.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ForeignIndex:
    """Content of an index that another program wrote.

    Attributes:
        tensors: Dtype and shape of each tensor.
        chunks: Chunks of each tensor.
        objects: Position of each object that is not a tensor.
    """

    tensors: dict[str, TensorEntry]
    chunks: dict[str, list[StoredChunk]]
    objects: dict[str, StoredObject]


def read_metadata(checkpoint: Path, manifest: Manifest) -> dict[str, list[StoredChunk]]:
    """Return the chunks of each tensor in *checkpoint*, all checked against *manifest*.

    Raises:
        CheckpointError: it names anything outside the format, tensors other than the manifest's,
            or bytes outside the manifest's files.
    """
    path = checkpoint / METADATA_NAME
    if METADATA_NAME not in manifest.files:
        raise CheckpointError(f"checkpoint `{checkpoint}` has no `{METADATA_NAME}`")
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    with _explained(path):
        record = _IndexUnpickler(io.BytesIO(_content(path))).load()
        return _Converter(manifest.tensors, sizes).index(record)


def read_foreign_metadata(directory: Path) -> ForeignIndex:
    """Return what an index lists that another program wrote, checked in itself.

    Raises:
        CheckpointError: it names anything outside the format, or bytes outside the files of
            *directory*.
    """
    path = directory / METADATA_NAME
    with _explained(path):
        stream = io.BytesIO(_content(path))
        record = _ForeignUnpickler(stream).load()
        fields = _fields(record, "Metadata")
        stated = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        stored = _mapping(fields.get("storage_data"), "storage_data")
        tensors = {name: _entry(name, one) for name, one in stated.items() if not _is_bytes(one)}
        others = stated.keys() - tensors.keys()
        ranges, objects = {}, {}
        for index, one in stored.items():
            name = _fields(index, "MetadataIndex").get("fqn")
            if name in others:
                objects[str(name)] = one
            else:
                ranges[index] = one
        entries = {name: stated[name] for name in tensors}
        record.state = {"state_dict_metadata": entries, "storage_data": ranges}
        sizes = {one.name: one.stat().st_size for one in directory.iterdir() if one.is_file()}
        _require_files(directory, stored.values(), sizes)
        converter = _Converter(tensors, sizes)
        return ForeignIndex(tensors, converter.index(record), converter.objects(objects))


def _require_files(directory: Path, records: Iterable[Any], sizes: Mapping[str, int]) -> None:
    """Raise a `CheckpointError` that names the files of an index that are missing.

    Names of files elsewhere are left to the check of each record.
    """
    names = {_fields(record, "_StorageInfo").get("relative_path") for record in records}
    plain = {name for name in names if isinstance(name, str) and name == Path(name).name}
    missing = sorted(plain - sizes.keys())
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        listed = ", ".join(f"`{name[:_SHOWN_CHARACTERS]}`" for name in missing[:_SHOWN_FILES])
        raise CheckpointError(
            f"`{directory}` is not complete",
            why=f"its index names {counted(len(missing), 'file')} that {verb} missing: {listed}",
            hint="copy the files of all ranks into one directory",
        )


def _content(path: Path) -> bytes:
    try:
        content = read_bounded_file(path, MAX_METADATA_BYTES)
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{path}`", why=why) from error
    if not content.startswith(pickle.PROTO):
        why = f"it is {'another file' if content else 'empty'} instead of the index of the tensors"
        hint = "copy the checkpoint again, or use an earlier one"
        raise CheckpointError(f"`{path}` is damaged", why=why, hint=hint)
    return content


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged pickle fails in many ways, and none of them is a bug of ours.
        raise CheckpointError(
            f"`{path}` is not an index that lmcore accepts",
            why=str(error) or type(error).__name__,
            hint="load checkpoints only from sources you trust; use an earlier one or a copy",
        ) from error


def _is_bytes(record: object) -> bool:
    return isinstance(record, _Record) and record.kind == _BYTES


def _entry(name: object, record: object) -> TensorEntry:
    """Return dtype and shape of a tensor as the index has them."""
    fields = _fields(record, "TensorStorageMetadata")
    properties = _state(fields.get("properties"), "TensorProperties")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        _refuse(f"tensor `{name!s:.80}` has no dtype")
    return TensorEntry(dtype_name(dtype), _sizes(fields.get("size")))


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
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickle an enum's member."""
    if owner is not _as_memory_format or name not in _MEMORY_FORMATS:
        raise pickle.UnpicklingError(f"it reads the attribute `{name!s:.80}`, refused")
    return name


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        # New classes for every file: changes that a pickle makes to them end with it.
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
            case (_, "_MEM_FORMAT_ENCODING") if module_name == METADATA_MODULE:
                return _as_memory_format
            case ("builtins", "getattr"):
                return _memory_format_member
        raise pickle.UnpicklingError(f"it names `{module_name}.{global_name}`, refused")


class _ForeignUnpickler(_IndexUnpickler):
    """Unpickler that makes records also of what other programs store beside the index.

    These are the plans of the ranks that saved, made of torch's classes, and the path.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return super().find_class(module_name, global_name)
        except pickle.UnpicklingError:
            inert = module_name.startswith(_PLAN_PACKAGE) or module_name == "pathlib"
            if not inert or "." in global_name:
                raise
        return type(global_name, (_PlanRecord,), {"kind": global_name})


class _PlanRecord(_Record):
    """Record that is made with arguments, such as a member of an enum."""

    def __init__(self, *args: object) -> None:
        self.args = args


class _Converter:
    """Converts records to stored chunks, and refuses all that `save_checkpoint` never writes."""

    def __init__(self, tensors: Mapping[str, TensorEntry], sizes: Mapping[str, int]) -> None:
        self._tensors, self._sizes = tensors, sizes

    def index(self, record: object) -> dict[str, list[StoredChunk]]:
        fields = _fields(record, "Metadata")
        stated = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        if stated.keys() != self._tensors.keys():
            odd = sorted(str(name)[:80] for name in stated.keys() ^ self._tensors.keys())
            _refuse(f"its tensors differ from the manifest's: {', '.join(odd[:10])}")
        ranges = self._ranges(_mapping(fields.get("storage_data"), "storage_data"))
        found: dict[str, list[StoredChunk]] = {}
        for name, entry in stated.items():
            found[name] = []
            for chunk in self._chunks(name, entry):
                stored = ranges.pop((name, chunk.offset), None)
                if stored is None:
                    _refuse(f"tensor `{name}` has a part that is stored nowhere")
                found[name].append(
                    StoredChunk(name, chunk, stored.file, stored.offset, stored.length)
                )
        if ranges:
            _refuse(f"it stores {len(ranges)} parts that belong to no tensor")
        return found

    def objects(self, stored: Mapping[str, object]) -> dict[str, StoredObject]:
        """Return the positions of objects, given their records."""
        return {
            name: self._range(name, _fields(one, "_StorageInfo")) for name, one in stored.items()
        }

    def _chunks(self, name: str, record: object) -> list[ChunkBounds]:
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
        chunks = [self._chunk(name, shape, chunk) for chunk in stored]
        if not is_partition(chunks, shape):
            _refuse(f"the parts of tensor `{name}` do not make the whole")
        return chunks

    def _chunk(self, name: str, shape: tuple[int, ...], record: object) -> ChunkBounds:
        fields = _fields(record, "ChunkStorageMetadata")
        chunk = ChunkBounds(_sizes(fields.get("offsets")), _sizes(fields.get("sizes")))
        if not is_inside(chunk, shape):
            _refuse(f"a part of tensor `{name}` lies outside it")
        return chunk

    def _ranges(self, stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], StoredObject]:
        ranges: dict[tuple[str, tuple[int, ...]], StoredObject] = {}
        for index, record in stored.items():
            fields = _fields(index, "MetadataIndex")
            name = fields.get("fqn")
            if not isinstance(name, str) or name not in self._tensors:
                _refuse("a stored part names a tensor that the manifest does not have")
            key = (name, _sizes(fields.get("offset")))
            if key in ranges:
                _refuse(f"a part of tensor `{name}` is stored twice")
            ranges[key] = self._range(name, _fields(record, "_StorageInfo"))
        return ranges

    def _range(self, name: str, fields: Mapping[str, Any]) -> StoredObject:
        file = fields.get("relative_path")
        if not isinstance(file, str) or file not in self._sizes or file == METADATA_NAME:
            _refuse(f"`{name}` is stored in `{str(file)[:80]}`, not a file of the manifest")
        offset, length = _sizes((fields.get("offset"), fields.get("length")))
        if offset + length > self._sizes[file]:
            _refuse(f"`{name}` is stored beyond the end of `{file}`")
        if fields.get("transform_descriptors"):
            _refuse(f"`{name}` is stored through a transformation")
        return StoredObject(file, offset, length)


def _refuse(why: str) -> NoReturn:
    raise pickle.UnpicklingError(why)


def _state(record: object, kind: str) -> Any:
    if not isinstance(record, _Record) or record.kind != kind:
        found = record.kind if isinstance(record, _Record) else type(record).__name__
        _refuse(f"`{found}` is in the place of `{kind}`")
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
