"""Position of a tensor's elements in an archive of torch, found without reading them.

torch's loader reads the whole record of a tensor, which may be larger than memory.  The pickle
beside it says where the elements are.  Only the form that torch writes for a plain tensor is known
here; it runs nothing, and for any other form the caller leaves the reading to torch.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from lmcore.base.crc32 import crc32

__all__ = ["StridedRecord", "strided_record"]

_DTYPES = {
    "torch DoubleStorage": ("float64", 8),
    "torch FloatStorage": ("float32", 4),
    "torch HalfStorage": ("float16", 2),
    "torch BFloat16Storage": ("bfloat16", 2),
}
"""Dtype and bytes of an element by the storage's class, as pickles name it."""
_PICKLE, _ORDER = "data.pkl", "byteorder"
_MAX_PICKLE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Beginning of a record: signature, then after other fields the lengths of name and extra field."""
_SIGNATURE = b"PK\x03\x04"
_IGNORED = {"PROTO", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_VALUES = {"GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class StridedRecord:
    """Elements of a contiguous tensor in an archive.

    Attributes:
        dtype: Name of the dtype.
        itemsize: Bytes of an element.
        shape: Shape of the tensor.
        position: Byte of the archive at which the first element is.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    position: int


def strided_record(stream: IO[bytes], archive: zipfile.ZipFile) -> StridedRecord | None:
    """Return the position of a plain, contiguous tensor; None if the archive has anything else.

    Args:
        stream: File of the archive.
        archive: The same, open.
    """
    names = {one.filename: one for one in archive.infolist()}
    pickled = next((one for one in names.values() if one.filename.endswith(f"/{_PICKLE}")), None)
    if pickled is None or pickled.file_size > _MAX_PICKLE_BYTES:
        return None
    folder = pickled.filename.removesuffix(_PICKLE)
    order = names.get(folder + _ORDER)
    if order is not None and _content(stream, order) != b"little":
        return None
    found = _tensor(_content(stream, pickled))
    if found is None:
        return None
    storage, count, key, offset, shape, strides = found
    dtype, itemsize = _DTYPES[storage]
    record = names.get(f"{folder}data/{key}")
    size = _contiguous_size(shape, strides)
    if record is None or record.file_size != count * itemsize or size is None:
        return None
    start = _data_start(stream, record)
    if start is None or offset < 0 or offset + size > count:
        return None
    return StridedRecord(dtype, itemsize, shape, start + offset * itemsize)


def _contiguous_size(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the number of elements of a contiguous tensor; None if it is not contiguous."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size < 0 or (size > 1 and stride != expected):
            return None
        expected *= size
    return expected


def _data_start(stream: IO[bytes], record: zipfile.ZipInfo) -> int | None:
    """Return the first byte of a stored record; None if it is compressed or damaged."""
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        return None
    stream.seek(record.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        return None
    signature, name, extra = _LOCAL_HEADER.unpack(header)
    if signature != _SIGNATURE:
        return None
    return int(record.header_offset + _LOCAL_HEADER.size + name + extra)


def _content(stream: IO[bytes], record: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a small record; none if it is compressed, large or damaged.

    `ZipFile.read` would refuse a record that torch wrote without a checksum, which is 0 then.
    """
    start = _data_start(stream, record)
    if start is None or record.file_size > _MAX_PICKLE_BYTES:
        return b""
    stream.seek(start)
    content = stream.read(record.file_size)
    if record.CRC and crc32(content) != record.CRC:
        return b""
    return content


def _tensor(
    pickled: bytes,
) -> tuple[str, int, str, int, tuple[int, ...], tuple[int, ...]] | None:
    """Return storage class, its elements, its key, offset, shape and strides of a plain tensor."""
    match _value(pickled):
        case (
            "torch._utils _rebuild_tensor_v2",
            (
                ("storage", str(storage), str(key), str(), int(count)),
                int(offset),
                shape,
                strides,
                *_,
            ),
        ) if storage in _DTYPES and _are_sizes(shape, strides):
            return storage, count, key, offset, shape, strides
    return None


def _are_sizes(shape: object, strides: object) -> bool:
    return (
        isinstance(shape, tuple)
        and isinstance(strides, tuple)
        and len(shape) == len(strides)
        and all(type(one) is int for one in (*shape, *strides))
    )


def _value(pickled: bytes) -> Any:
    """Return a pickle's value, a call as the pair of its function's name and its arguments.

    None for a damaged pickle, and for one with an operation that a plain tensor does not need.
    """
    stack: list[Any] = []
    marks: list[int] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            name = operation.name
            if name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "MARK":
                marks.append(len(stack))
            elif name in _TUPLES or name == "TUPLE":
                first = marks.pop() if name == "TUPLE" else len(stack) - _TUPLES[name]
                stack[first:] = [tuple(stack[first:])]
            elif name == "REDUCE":
                stack[-2:] = [tuple(stack[-2:])]
            elif name == "STOP":
                return stack[0] if len(stack) == 1 else None
            elif name not in _IGNORED and name != "BINPERSID":
                return None
    except Exception:  # noqa: BLE001 - a damaged pickle fails in many ways, and torch reports it
        return None
    return None
