"""Traces that a plugin's code leaves in its process: output, variables, threads, settings.

    before = ProcessState.now()
    ...                            # the plugin's code runs
    faults = before.changed_settings()

Part of `lmcore plugin check`.  Functions that are replaced are in `replaced`, imports in
`import_watch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import locale
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import counted

__all__ = ["Clock", "ProcessState", "StandardOutput", "TorchState", "open_devices"]

_HARMLESS = ("/dev/null", "/dev/pts/", "/dev/tty", "/dev/urandom", "/dev/random", "/dev/shm/")  # noqa: S108
_LONGEST_TEXT = 60


class Clock:
    """Seconds since it was made: of processor time, and without the wait for a busy processor."""

    def __init__(self) -> None:
        self._wall, self._queue, self._busy = time.perf_counter(), _queued(), time.process_time()

    def seconds(self) -> float:
        """Return the time that passed, without the time that other processes took."""
        return time.perf_counter() - self._wall - (_queued() - self._queue)

    def busy(self) -> float:
        """Return the processor time."""
        return time.process_time() - self._busy


def _queued() -> float:
    """Return how long the main thread could have run and did not; 0 where Linux does not say."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


class StandardOutput:
    """File in the place of standard output, also for native code and child processes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._read = 0
        sys.stdout.flush()
        os.dup2(self._file.fileno(), 1)

    def new_text(self) -> str:
        """Return the beginning of what was written since the last call; empty if nothing was."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # replaced or closed
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).fflush(None)
        written = os.fstat(self._file.fileno()).st_size
        start, self._read = self._read, written
        text = os.pread(self._file.fileno(), written - start, start).decode(errors="replace")
        return f"{text[:_LONGEST_TEXT]}..." if len(text) > _LONGEST_TEXT else text


def open_devices() -> set[str]:
    """Return the devices that this process has open."""
    links = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the folder's own descriptor vanishes
        try:
            links.add(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - the same
        except OSError:
            continue
    return {link for link in links if link.startswith("/dev/") and not link.startswith(_HARMLESS)}


@dataclass(frozen=True)
class ProcessState:
    """State of this process, without torch's.

    Attributes:
        settings: Values that a plugin must not change, by their description.
        variables: The environment: of Python, and as native code sees it.
        devices: Devices that are open.
        threads: Number of threads.
        children: Processes that this one has started, and that have not been waited for.
    """

    settings: Mapping[str, Any]
    variables: Mapping[str, tuple[str | None, str | None]]
    devices: frozenset[str]
    threads: int
    children: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the present state."""
        return cls(
            _read(_SETTINGS) | _signal_handlers(),
            _environment(),
            frozenset(open_devices()),
            _threads(),
            frozenset(_children()),
        )

    def changed_variables(self) -> list[str]:
        """Return the variables that are different now."""
        now = _environment()
        names = sorted(self.variables.keys() | now)
        return [name for name in names if self.variables.get(name) != now.get(name)]

    def changed_settings(self) -> list[str]:
        """Return the settings that are different now, a fault for each."""
        return _changed(self.settings, _read(_SETTINGS) | _signal_handlers())

    def left(self) -> list[str]:
        """Return the devices, threads and processes that are new, a fault for each."""
        faults = [f"`{path}` stays open" for path in sorted(open_devices() - self.devices)]
        faults += _stays("thread", _threads() - self.threads)
        return faults + _stays("process", len({*_children()} - self.children), "processes")


@dataclass(frozen=True)
class TorchState:
    """Torch's global settings, by their description."""

    settings: Mapping[str, Any]

    @classmethod
    def now(cls, device_type: str = "") -> TorchState:
        """Return the present state; torch is imported.

        Args:
            device_type: Type whose own flags in `torch.backends` are not read.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flags that torch will remove
            found = _read(_TORCH_SETTINGS) | _autocast(device_type)
            return cls(found | _backend_flags(device_type) | _host_kernels())

    def changes(self, device_type: str = "") -> list[str]:
        """Return what is different now, a fault for each."""
        return _changed(self.settings, TorchState.now(device_type).settings)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"it changes {name}"
        + (f" from {value!r} to {now[name]!r}" if isinstance(value, _SHOWN) else "")
        for name, value in before.items()
        if name in now and now[name] != value
    ]


_SHOWN = (bool, int, float, str)


def _stays(what: str, count: int, plural: str = "") -> list[str]:
    if count <= 0:
        return []
    return [f"{counted(count, what, plural)} {'stays' if count == 1 else 'stay'}"]


def _read(settings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the values that can be read here."""
    found = {}
    for name, read in settings.items():
        with contextlib.suppress(Exception):  # not on this system, or not in this version
            found[name] = read()
    return found


def _signal_handlers() -> dict[str, Any]:
    return {
        f"the handler of {number.name}": signal.getsignal(number)
        for number in signal.Signals
        if number in signal.valid_signals()
    }


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _if_loaded(module: str, read: Callable[[Any], Any]) -> Any:
    return read(sys.modules[module]) if module in sys.modules else None


_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "the working directory": os.getcwd,
    "the umask": _umask,
    "`sys.path`": lambda: tuple(sys.path),
    "`sys.meta_path`": lambda: tuple(sys.meta_path),
    "`sys.path_hooks`": lambda: tuple(sys.path_hooks),
    "`sys.stdin`": lambda: sys.stdin,
    "`sys.stdout`": lambda: sys.stdout,
    "`sys.stderr`": lambda: sys.stderr,
    "`sys.excepthook`": lambda: sys.excepthook,
    "`sys.argv`": lambda: tuple(sys.argv),
    "`threading.excepthook`": lambda: threading.excepthook,
    "the recursion limit": sys.getrecursionlimit,
    "the switch interval": sys.getswitchinterval,
    "the trace function": sys.gettrace,
    "the profile function": sys.getprofile,
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the level of the root logger": lambda: logging.getLogger().level,
    "the handlers of the root logger": lambda: tuple(logging.getLogger().handlers),
    "`logging.disable`": lambda: logging.root.manager.disable,
    "the default timeout of sockets": lambda: _if_loaded("socket", lambda m: m.getdefaulttimeout()),
    "the state of `random`": lambda: _if_loaded("random", lambda m: hash(m.getstate())),
    "the start method of `multiprocessing`": lambda: _if_loaded(
        "multiprocessing", lambda m: m.get_start_method(allow_none=True)
    ),
    "the processors of this process": lambda: os.sched_getaffinity(0),
    "the priority of this process": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "the resource limits": lambda: tuple(
        resource.getrlimit(getattr(resource, name))
        for name in sorted(dir(resource))
        if name.startswith("RLIMIT_")
    ),
}


def _torch() -> Any:
    return sys.modules["torch"]


def _global_hooks() -> int:
    module = sys.modules["torch.nn.modules.module"]
    names = [name for name in vars(module) if name.startswith("_global_") and "hooks" in name]
    return sum(len(getattr(module, name)) for name in names)


def _stack(name: str) -> int:
    return int(getattr(_torch()._C, name)())  # noqa: SLF001 - torch has no public name for it


_TORCH_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "torch's default dtype": lambda: str(_torch().get_default_dtype()),
    "torch's default device": lambda: str(_torch().get_default_device()),
    "torch's number of threads": lambda: _torch().get_num_threads(),
    "torch's number of inter-op threads": lambda: _torch().get_num_interop_threads(),
    "torch's deterministic mode": lambda: _torch().are_deterministic_algorithms_enabled(),
    "torch's precision of float32 products": lambda: _torch().get_float32_matmul_precision(),
    "torch's gradient mode": lambda: _torch().is_grad_enabled(),
    "torch's inference mode": lambda: _torch().is_inference_mode_enabled(),
    "torch's warnings in place of deterministic errors": (
        lambda: _torch().is_deterministic_algorithms_warn_only_enabled()
    ),
    "torch's filling of new memory": (
        lambda: _torch().utils.deterministic.fill_uninitialized_memory
    ),
    "the flush of denormal numbers": lambda: sys.float_info.min / 2 == 0,
    "torch's anomaly mode": lambda: _torch().is_anomaly_enabled(),
    "torch's cache of autocast": lambda: _torch().is_autocast_cache_enabled(),
    "the seed of torch's CPU generator": lambda: _torch().initial_seed(),
    "torch's print options": lambda: str(_torch()._tensor_str.PRINT_OPTS),  # noqa: SLF001 - no other way
    "the number of torch's global module hooks": _global_hooks,
    "the number of torch's function modes": lambda: _stack("_len_torch_function_stack"),
    "the number of torch's dispatch modes": lambda: _stack("_len_torch_dispatch_stack"),
}


_HOST_KEYS = {
    *("CPU", "AutogradCPU", "AutocastCPU"),
    *("Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd"),
}
"""Dispatch keys of torch under which a kernel computes on the CPU."""


def _autocast(device_type: str) -> dict[str, Any]:
    """Return whether autocast is on, and its dtype, on the CPU and on the device."""
    found = {}
    for kind, name in {device_type: "the device", "cpu": "the CPU"}.items():
        if kind:
            with contextlib.suppress(RuntimeError, AttributeError):  # no autocast, or no such torch
                found[f"torch's autocast on {name}"] = _torch().is_autocast_enabled(kind)
                dtype = str(_torch().get_autocast_dtype(kind))
                found[f"the dtype of torch's autocast on {name}"] = dtype
    return found


def _backend_flags(device_type: str) -> dict[str, Any]:
    """Return the flags of torch's backends but the device's own."""
    found = {}
    for path, module in list(sys.modules.items()):
        owner, _, name = path.rpartition(".")
        if owner != "torch.backends" or name == device_type or module is None:
            continue
        for flag in {*dir(type(module)), *vars(module)}:
            if flag.startswith("_"):
                continue
            with contextlib.suppress(Exception):  # a flag of a backend that is not built
                value = getattr(module, flag)
                precision = getattr(value, "fp32_precision", None)  # of one kind of its ops
                if isinstance(value, bool) or flag == "fp32_precision":
                    found[f"`torch.backends.{name}.{flag}`"] = value
                elif isinstance(precision, str):
                    found[f"`torch.backends.{name}.{flag}.fp32_precision`"] = precision
    return found


def _host_kernels() -> dict[str, Any]:
    """Return the number of Python kernels that replace torch's own on the CPU."""
    library = sys.modules.get("torch.library")
    keys = [str(key).split("/") for key in getattr(library, "_impls", ())]  # "aten/add/CPU"
    count = sum(key[0] == "aten" and key[-1] in _HOST_KEYS for key in keys)
    return {"the number of kernels that replace torch's own on the CPU": count}


def _environment() -> dict[str, tuple[str | None, str | None]]:
    """Return each variable as Python and as native code sees it."""
    native: dict[str, str] = {}
    with contextlib.suppress(ValueError, AttributeError):
        entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
        places = itertools.takewhile(lambda place: entries[place] is not None, itertools.count())
        for place in places:
            name, _, value = os.fsdecode(entries[place] or b"").partition("=")
            native[name] = value
    names = os.environ.keys() | native
    return {name: (os.environ.get(name), native.get(name)) for name in names}


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only counted
    except OSError:
        return threading.active_count()


def _children() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            yield from (task / "children").read_text(encoding="ascii").split()
