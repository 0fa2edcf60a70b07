"""Adapter that lets torch.distributed's process groups meet at the store of the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed

from lmcore.runtime.store.client import StoreClient

__all__ = ["TorchStore"]

_LONGEST_WAIT = 10.0
"""Longest wait of one request, in seconds: the answer shows that the server runs."""


class TorchStore(distributed.Store):  # type: ignore[name-defined,misc]  # public all the same
    """`torch.distributed.Store` over a `StoreClient`, with a prefix before all keys.

    torch's C++ code calls these methods through this object: its owner keeps it as long as there
    are process groups.

    Args:
        client: Client of the store.
        prefix: Prefix of all keys.
    """

    def __init__(self, client: StoreClient, prefix: str) -> None:
        super().__init__()
        self._client, self._prefix = client, prefix
        self._seconds = client.timeout

    def clone(self) -> TorchStore:
        """Return this store: its client may be used by any thread."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of `get` and `wait`."""
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Store *value* under *key*."""
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Return the value of *key*, as soon as it has one.

        Raises:
            torch.distributed.DistStoreError: It has none within the time limit.
        """
        self.wait([key])
        value = self._client.get(self._prefix + key)
        if value is None:
            raise distributed.DistStoreError(f"key `{key}` was removed")
        return value

    def add(self, key: str, amount: int) -> int:
        """Add *amount* to the number at *key* and return the sum."""
        return self._client.add(self._prefix + key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Append *value* to the value of *key*."""
        self._client.append(self._prefix + key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set *key* to *desired* if its value is *expected*; return the value afterwards."""
        return self._client.compare_set(self._prefix + key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove *key*; return True if it was there."""
        return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        """Return the number of keys of the whole store."""
        return self._client.count()

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all *keys* have values."""
        return self._client.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all *keys* have values.

        Raises:
            torch.distributed.DistStoreError: They have none within the time limit.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        names = [self._prefix + key for key in keys]
        end = time.monotonic() + seconds
        while not self._client.wait(names, max(0.0, min(_LONGEST_WAIT, end - time.monotonic()))):
            if time.monotonic() >= end:
                shown = ", ".join(f"`{key}`" for key in keys)
                raise distributed.DistStoreError(f"no process has set {shown} within {seconds:g} s")
