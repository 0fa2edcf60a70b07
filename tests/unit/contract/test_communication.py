"""Communication backend that torch has registered for a device type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import distributed

from lmcore.contract.communication import registered_comm_backends


@pytest.mark.parametrize(
    "registered, found",
    [
        ({"chip": "chipccl"}, ["chipccl"]),
        (dict.fromkeys("chip", "chipccl"), ["chipccl"]),  # given to torch as text
        ({"chip": "chipccl", "c": "other", "h": "other"}, ["chipccl"]),
        ({"c": "chipccl", "h": "chipccl", "i": "chipccl"}, []),
        ({**dict.fromkeys("chip", "chipccl"), "p": "other"}, []),
        ({}, []),
    ],
)
def test_the_registered_backend_is_found(monkeypatch, registered, found):
    """Under the type, or under each of its letters, which torch takes from a type given as text."""
    monkeypatch.setattr(distributed.Backend, "default_device_backend_map", registered)
    backends = registered_comm_backends(SimpleNamespace(type="chip"))
    assert [backend.name for backend in backends] == found
    assert all(backend.device_type == "chip" for backend in backends)
