"""Messages of the store: sealed, opened in order, and refused when they are altered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.runtime.store.wire import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    PROOF_BYTES,
    Authenticator,
    WireError,
    pack,
    proof,
    unpack,
)


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_fields_return(fields: list[bytes]) -> None:
    """Packed fields are unpacked unchanged, also empty ones."""
    assert unpack(pack(fields)) == fields


@given(st.binary(max_size=60))
def test_malformed_fields_are_refused(content: bytes) -> None:
    """Any bytes are either the fields that they were packed from, or an error."""
    try:
        fields = unpack(content)
    except WireError:
        return
    assert pack(fields) == content


def split(message: bytes) -> tuple[bytes, bytes]:
    """Return the content and the code of a sealed message."""
    return message[LENGTH_BYTES:-PROOF_BYTES], message[-PROOF_BYTES:]


def test_messages_open_in_order_alone() -> None:
    """A message that is repeated, skipped, altered or of the other direction is refused."""
    sender = Authenticator(b"secret", b"client", b"nonces")
    first, second = (split(sender.seal(content)) for content in (b"one", b"two"))

    def receiver(role: bytes = b"client", nonces: bytes = b"nonces") -> Authenticator:
        return Authenticator(b"secret", role, nonces)

    good = receiver()
    assert [good.open(*first), good.open(*second)] == [b"one", b"two"]
    repeated = receiver()
    repeated.open(*first)
    for wrong, message in [
        (repeated, first),
        (receiver(), second),
        (receiver(), (b"uno", first[1])),
        (receiver(b"server"), first),
        (receiver(nonces=b"others"), first),
        (Authenticator(b"another", b"client", b"nonces"), first),
    ]:
        with pytest.raises(WireError):
            wrong.open(*message)


def test_a_proof_depends_on_all() -> None:
    """Secret, role and both nonces enter."""
    proofs = {
        proof(*arguments)
        for arguments in [
            (b"s", b"client", b"1" * 32, b"2" * 32),
            (b"t", b"client", b"1" * 32, b"2" * 32),
            (b"s", b"server", b"1" * 32, b"2" * 32),
            (b"s", b"client", b"3" * 32, b"2" * 32),
            (b"s", b"client", b"1" * 32, b"3" * 32),
        ]
    }
    assert len(proofs) == 5


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    """The sender says so, before the other side cuts the connection."""

    class Endless(bytes):
        def __len__(self) -> int:
            return MAX_MESSAGE_BYTES + 1

    with pytest.raises(WireError, match="at most"):
        Authenticator(b"s", b"client", b"n").seal(Endless())
