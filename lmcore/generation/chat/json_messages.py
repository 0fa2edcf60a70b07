"""JSON values between two processes, each with its length before it."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

__all__ = ["read_message", "write_message"]

_LENGTH = struct.Struct("<Q")


def read_message(source: IO[bytes]) -> Any:
    """Return the next value; None at the end.

    Args:
        source: Buffered stream of the other process.
    """
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = source.read(length)
    return json.loads(content) if len(content) == length else None


def write_message(sink: IO[bytes], value: Any) -> None:
    """Write a value.

    Args:
        sink: Buffered stream to the other process.
        value: JSON value.

    Raises:
        TypeError, ValueError: It is no JSON value.
        OSError: The reader has gone.
    """
    content = json.dumps(value).encode()
    sink.write(_LENGTH.pack(len(content)) + content)
    sink.flush()
