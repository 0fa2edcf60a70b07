"""Location of a crash, a hang or an exception: the innermost line that is in a plugin's package.

The innermost line of all is often in a library (`ctypes`, torch), which does not help the author of
the plugin to find the fault; it is named as well.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcore.plugin.known_packages import GROUP

__all__ = ["crash_location", "exception_location"]

_HEAD = re.compile(r"(Current thread|Thread|Stack) ?[^\n]*\(most recent call first\):")
_KIT = "lmcore_conformance"
"""The package that calls plugins to check them, itself a plugin."""

_LINE = re.compile(r'  File "([^"]+)", line (\d+) in (.+)')


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    def within(self, folders: Sequence[Path]) -> str:
        """Return the file relative to the folder around the plugin's package; empty if outside."""
        path = Path(self.file)
        inside = (folder for folder in folders if path.is_relative_to(folder))
        return next((str(path.relative_to(folder.parent)) for folder in inside), "")

    def place(self, shown: str = "") -> str:
        return f"{shown or Path(self.file).name}, line {self.line}"


def crash_location(log: str) -> str:
    """Return the function and line of a crash, from the stack that `faulthandler` wrote to *log*.

    Empty if there is no stack.
    """
    frames = _stack(log)
    if not frames:
        return ""
    innermost = frames[0]
    own = _of_plugin(frames)
    if own is None:
        return f"; it was in `{innermost.function}` ({innermost.place()})"
    frame, shown = own
    text = f"; it was in `{frame.function}` ({frame.place(shown)})"
    if frame is innermost:
        return text
    return f"{text}, which called `{innermost.function}` ({innermost.place()})"


def exception_location(error: BaseException) -> str:
    """Return the file and line of a plugin at which an exception, or its cause, was raised.

    Empty if no line of a plugin was being executed.
    """
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        context = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or context
    for link in reversed(chain):
        frames = [
            _Frame(frame.filename, frame.lineno or 0, frame.name)
            for frame in reversed(traceback.extract_tb(link.__traceback__))
        ]
        own = _of_plugin(frames)
        if own is not None:
            return own[0].place(own[1])
    return ""


def _of_plugin(frames: Sequence[_Frame]) -> tuple[_Frame, str] | None:
    """Return the innermost frame of a plugin, and its file as it is shown."""
    folders = list(_plugin_folders()) if frames else []
    for frame in frames:
        shown = frame.within(folders)
        if shown:
            return frame, shown
    return None


def _stack(log: str) -> list[_Frame]:
    """Return the frames of the thread that crashed, else of the main thread; innermost first."""
    stacks: list[tuple[bool, list[_Frame]]] = []
    inside = False
    for text in log.splitlines():
        head, found = _HEAD.match(text), _LINE.match(text)
        if head:
            stacks.append((head[1].startswith("Current"), []))
            inside = True
        elif found and inside:
            stacks[-1][1].append(_Frame(found[1], int(found[2]), found[3]))
        else:
            inside = False
    filled = [stack for stack in stacks if stack[1]]
    current = [frames for is_current, frames in filled if is_current]
    # The main thread is the last.
    return current[-1] if current else (filled[-1][1] if filled else [])


def _plugin_folders() -> Iterator[Path]:
    """Yield the folders of the packages of all installed plugins; imports none of them."""
    packages = {
        point.module.partition(".")[0] for point in importlib.metadata.entry_points(group=GROUP)
    }
    for package in packages - {_KIT}:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder)
