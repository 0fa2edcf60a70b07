"""Wire format of the store: mutual proof of the secret, then messages with authentication codes.

The server opens with `MAGIC` and a nonce; the client answers with a nonce and its proof; the server
answers with its own.  A proof is HMAC-SHA256 over the role and both nonces, so that neither side
can repeat the other's.  From both nonces each direction gets a key; a message is its length in four
bytes, its content, and HMAC-SHA256 of its number and content: altered, repeated, reordered and
foreign messages are refused.  Contents are not encrypted.

Source: challenge and response with mutual authentication as in ISO/IEC 9798-4; HMAC: RFC 2104.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

__all__ = [
    "HELLO_BYTES",
    "LENGTH_BYTES",
    "MAGIC",
    "MAX_MESSAGE_BYTES",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "REFUSAL",
    "Authenticator",
    "WireError",
    "pack",
    "proof",
    "unpack",
]

MAGIC = b"lmcore-store-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)
"""Answer to a wrong proof, instead of the server's own; a closed connection may be tried again."""
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 28
"""Largest message: far above the checkpoint plans of thousands of ranks."""

_FIELD = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class WireError(Exception):
    """A message that breaks the format, or was not made with the secret."""


def proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that *role* (`b"server"` or `b"client"`) knows *secret*."""
    return hmac.digest(secret, role + server_nonce + client_nonce, hashlib.sha256)


class Authenticator:
    """Seals the messages of one direction of one connection, or opens them, in order.

    Args:
        secret: Secret of the run.
        role: Sender, `b"server"` or `b"client"`.
        nonces: Nonces of the server and of the client, one after the other.
    """

    def __init__(self, secret: bytes, role: bytes, nonces: bytes) -> None:
        self._key = hmac.digest(secret, b"messages of the " + role + nonces, hashlib.sha256)
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """Return the message with *content*: its length, the content, and its code.

        Raises:
            WireError: It is larger than `MAX_MESSAGE_BYTES`.
        """
        if len(content) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(content):,} bytes; {MAX_MESSAGE_BYTES:,} at most")
        return _FIELD.pack(len(content)) + content + self._code(content)

    def open(self, content: bytes, code: bytes) -> bytes:
        """Return *content* if *code* is its authentication code.

        Raises:
            WireError: It is not.
        """
        if not hmac.compare_digest(code, self._code(content)):
            raise WireError("a message without a valid authentication code")
        return content

    def _code(self, content: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, _NUMBER.pack(number) + content, hashlib.sha256)


def pack(fields: Sequence[bytes]) -> bytes:
    """Return the fields of a message, each after its length."""
    return b"".join(_FIELD.pack(len(field)) + field for field in fields)


def unpack(content: bytes) -> list[bytes]:
    """Return the fields of a message.

    Raises:
        WireError: A length goes beyond the end.
    """
    fields = []
    position = 0
    while position < len(content):
        start = position + _FIELD.size
        if start > len(content):
            raise WireError("a message that ends inside a length")
        (length,) = _FIELD.unpack_from(content, position)
        position = start + length
        if position > len(content):
            raise WireError("a field that is longer than its message")
        fields.append(content[start:position])
    return fields
