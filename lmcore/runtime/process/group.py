"""Process group of a run: exchange of tensors by the device's communication backend."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract.device_errors import first_line
from lmcore.plugin import choose_comm_backend, comm_backends
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.process.rendezvous import Rendezvous
from lmcore.runtime.store.client import StoreClient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.contract.communication import CommBackend
    from lmcore.contract.device import Device
    from lmcore.plugin import PluginSet, Selection


__all__ = [
    "Processes",
    "TorchStore",
    "backend_of",
    "start_processes",
]

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


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_RECORDED_COLLECTIVES = "TORCH_FR_BUFFER_SIZE"
_RECORDED_COLLECTIVES_BEFORE = r"TORCH_\w+_TRACE_BUFFER_SIZE"
"""Older names of the variable; each backend has one."""
_LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux, of macOS


@dataclass(frozen=True)
class Processes:
    """The processes of a run, connected by torch.distributed's default group.

    Attributes:
        rank: Rank of this process.
        backend: Communication backend for tensors.
        rendezvous: Connection for JSON values.
        timeout: Time limit of a collective, in seconds.
    """

    rank: RankInfo
    backend: CommBackend
    rendezvous: Rendezvous
    timeout: float

    def gather(self, value: Any, about: str = "an exchange") -> list[Any]:
        """Return every rank's small JSON *value*, in the order of ranks; see `Rendezvous`."""
        return self.rendezvous.gather(value, about)

    def barrier(self, about: str = "a barrier") -> None:
        """Wait until every rank has called it, but not for work queued on devices."""
        self.rendezvous.barrier(about)

    def new_group(self, ranks: Sequence[int], name: str = "") -> ProcessGroup | None:
        """Return a group of some *ranks*, with the run's timeout; None on ranks outside it.

        All ranks must call it, in the same order.  torch's default timeout of a group is half an
        hour, whatever the timeout of the default group is.

        Args:
            ranks: Global ranks of the group.
            name: Name of the group for messages, such as "tensor".
        """
        from torch import distributed

        limit = timedelta(seconds=self.timeout)
        group = distributed.new_group(list(ranks), timeout=limit, group_desc=name or None)
        return group if self.rank.rank in ranks else None


def backend_of(
    plugins: PluginSet, selection: Selection, device: Device, wanted: str | None = None
) -> CommBackend:
    """Return the device's communication backend: the best, or the one named *wanted*.

    Raises:
        DeviceError: There is no backend, or none of that name.
    """
    offered = comm_backends(plugins, selection, device)
    return choose_comm_backend(
        [backend for backend in offered if backend.device_type == device.type], wanted
    )


@contextlib.contextmanager
def start_processes(
    plugins: PluginSet,
    selection: Selection,
    device: Device,
    rendezvous: Rendezvous,
    *,
    timeout: float,
    wanted: str | None = None,
) -> Iterator[Processes]:
    """Create torch.distributed's default group for *device*, and destroy it at the end.

    All ranks must call it; once per process.

    Args:
        plugins: Plugins that `discover` found.
        selection: The launcher's decision.
        device: Device of this process, which is made the current one.
        rendezvous: Connection from `join_processes`.
        timeout: Time limit of a collective in this group and in groups made from it, in seconds.
        wanted: Name of the backend; None: the best one.

    Raises:
        DeviceError: The device has no such communication backend, or it does not work.
        PluginError: The backend could not be registered with torch.
        RunError: Another rank stopped.
    """
    from torch import distributed

    from lmcore.runtime.process.group import TorchStore

    _keep_on_host(rendezvous.rank)
    _record_collectives()
    store = TorchStore(rendezvous.store, "group/")  # torch calls it as long as there are groups
    backend = backend_of(plugins, selection, device, wanted)
    _register(backend, selection)
    # Before the group is created: a backend that looks later may take another rank's device.
    device.set_current()
    rendezvous.barrier(f"all ranks to be ready for `{backend.name}`")
    try:
        distributed.init_process_group(
            backend.name,
            store=store,
            rank=rendezvous.rank.rank,
            world_size=rendezvous.rank.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device.torch_device if backend.needs_device_id else None,
        )
    except (RuntimeError, ValueError) as cause:
        failure = rendezvous.reported_failure()  # of another rank, which explains this one
        if failure:
            raise failure from cause
        raise DeviceError(
            f"rank {rendezvous.rank.rank} cannot connect its device through `{backend.name}`",
            why=first_line(cause),
            hint="run `lmcore doctor` on every host of the run",
        ) from cause
    try:
        rendezvous.barrier(f"all ranks to be connected through `{backend.name}`")
        yield Processes(rendezvous.rank, backend, rendezvous, timeout)
    except RuntimeError:  # torch's, perhaps, because another rank stopped: `join_processes` looks
        raise
    except BaseException as error:
        # Before the connections close: other ranks, in a collective, look for the report.
        rendezvous.report_failure(error)
        raise
    finally:
        # The body may have destroyed it, as an engine of another package does.
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _keep_on_host(rank: RankInfo) -> None:
    """Let gloo listen at the loopback interface if all processes of the run are on this host.

    Its connections are not authenticated, and by default it takes the interface of the host's name.
    A choice of the user is kept.
    """
    if rank.world_size == rank.local_world_size:
        names = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
        if names:
            os.environ.setdefault(_GLOO_INTERFACE, names[0])


def _record_collectives() -> None:
    """Let torch's flight recorder keep the last collectives, as newer versions do by default.

    A choice of the user is kept.
    """
    if not any(re.fullmatch(_RECORDED_COLLECTIVES_BEFORE, name) for name in os.environ):
        os.environ.setdefault(_RECORDED_COLLECTIVES, "2000")


def _register(backend: CommBackend, selection: Selection) -> None:
    """Register the backend with torch.

    Raises:
        PluginError: The plugin's function raised.
    """
    if backend.register is None:
        return
    try:
        backend.register()
    except Exception as cause:
        raise PluginError(
            f"communication backend `{backend.name}` cannot be registered with torch",
            why=f"{type(cause).__name__}: {cause}",
            hint=f"update or remove `{selection.distribution}`, or report this to its authors",
        ) from cause
