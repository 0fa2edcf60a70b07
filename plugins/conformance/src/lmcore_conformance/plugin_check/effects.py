"""Effects of a plugin's code on its process: everything that it changes besides its result.

    effects = Effects(point)
    effects.begin()
    ...                            # a hook is called
    for effect in effects.found(): ...

Part of `lmcore plugin check`; a process has one `Effects`.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lmcore_conformance.plugin_check.import_watch import ForkWatch
from lmcore_conformance.plugin_check.replaced import Functions
from lmcore_conformance.plugin_check.source import source_files
from lmcore_conformance.plugin_check.traces import ProcessState, StandardOutput, TorchState

__all__ = ["Effect", "Effects"]

_OF_COMPILERS = ("TORCHINDUCTOR_", "TRITON_")
"""Beginnings of variables that torch's compiler sets when it is first used."""


@dataclass(frozen=True)
class Effect:
    """A change that a plugin's code made.

    Attributes:
        text: The change, in words: "it prints to standard output: 'hello'".
        is_fault: False if the code may have a reason for it where its device is used.
    """

    text: str
    is_fault: bool = True


class Effects:
    """State of this process before a plugin's code runs, and what is different after it."""

    def __init__(self, point: importlib.metadata.EntryPoint, *, in_launcher: bool) -> None:
        """Take standard output, and watch for forks, from now until the process ends.

        Args:
            point: The plugin's entry point.
            in_launcher: True if every command calls the code, also if it uses another device.
        """
        self.files = source_files(point.module)
        self.device_type = ""
        self._own = {point.module.partition(".")[0]}
        self.in_launcher = in_launcher
        self._output = StandardOutput()
        self._forks = ForkWatch(self.files)
        self._process = os.getpid()
        self.begin()

    def begin(self) -> None:
        """Take the present state as the state to compare with."""
        self._output.new_text()
        self._forks.places.clear()
        self._state = ProcessState.now()
        self._torch = TorchState.now(self.device_type) if "torch" in sys.modules else None

    def begin_functions(self, package: str = "") -> None:
        """Take the present functions for comparison.

        Args:
            package: Package of the functions; default: all that are loaded but the plugin's.
        """
        self._functions = Functions(package, left_out=self._own)

    @property
    def fork_places(self) -> list[str]:
        """File and line of each fork since `begin`."""
        return list(dict.fromkeys(self._forks.places))

    def end_copy(self) -> None:
        """End this process if it is a copy that the plugin's code has made and returned from."""
        if os.getpid() != self._process:
            os._exit(0)

    def found(self) -> Iterator[Effect]:
        """Yield what has changed since `begin`, but for functions."""
        self.end_copy()
        for place in self.fork_places:
            text = f"it forks the process ({place}), so that the command goes on in two processes"
            yield Effect(text)
        printed = self._output.new_text()
        if printed:
            text = f"it prints to standard output, which belongs to the command: {printed!r}"
            yield Effect(text, self.in_launcher)
        yield from self.torch_settings()
        for name in self._state.changed_variables():
            if self.in_launcher or not name.startswith(_OF_COMPILERS):
                text = f"it changes the environment variable `{name}`"
                yield Effect(text, self.in_launcher)
        yield from map(Effect, self._state.changed_settings())
        if self.in_launcher:
            yield from map(Effect, self._state.left())

    def torch_settings(self) -> Iterator[Effect]:
        """Yield the settings of torch that have changed since `begin`, if it was loaded then."""
        if self._torch is not None:
            yield from map(Effect, self._torch.changes(self.device_type))

    def replaced(self) -> Iterator[Effect]:
        """Yield the functions that are replaced since `begin_functions`."""
        for one in self._functions.replaced(self.files):
            by = f" by a function of {one.place}" if one.place else ""
            yield Effect(f"`{one.path}` is replaced{by}", one.by_plugin)
