"""Line of the user's program at which an error was raised, and the hook that shows it.

`lmcore run` and `lmcore.start` report an `LmcoreError` of a script by its message and the line of
the script, any other exception by its traceback.  Torch-free.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

from lmcore.base.errors import LmcoreError, printable

__all__ = [
    "ExceptHook",
    "add_device_hint",
    "caller_line",
    "error_text",
    "install_excepthook",
    "previous_hook",
    "user_line",
]

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_PACKAGES = ("lmcore", "torch")
"""Packages, and prefixes `lmcore_` of plugins, whose lines are not the user's."""


def user_line(trace: TracebackType | None) -> str | None:
    """Return the innermost line of a traceback that is in the user's program.

    Lines of lmcore, its plugins, torch, installed packages and the standard library do not count.

    Returns:
        File, line number and source, such as "train.py, line 12: rt.step(optimizer)"; None if no
        line of the traceback is the user's.
    """
    return _first_of_user(reversed(list(traceback.walk_tb(trace))))


def caller_line() -> str | None:
    """Return the line of the user's program that is being executed, as `user_line`."""
    return _first_of_user(traceback.walk_stack(None))


def _first_of_user(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    for frame, line in frames:
        if _is_users(frame):
            file = frame.f_code.co_filename
            source = linecache.getline(file, line, frame.f_globals).strip()
            return f"{_short_path(file)}, line {line}{f': {source}' if source else ''}"
    return None


def error_text(error: BaseException) -> str:
    """Return the text that reports an uncaught exception, without a trailing newline.

    It is the message of an `LmcoreError` with the line of the user's program below its first line,
    or the traceback of any other exception.
    """
    if not isinstance(error, LmcoreError):
        return "".join(traceback.format_exception(error)).rstrip("\n")
    text = error.render()
    # The error of a lost peer is raised at the end of a session, because of one within it.
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    line = next(filter(None, (user_line(each.__traceback__) for each in reversed(chain))), None)
    if line is None:
        return text
    what, *rest = text.split("\n")
    return "\n".join([what, printable(f"at: {line}"), *rest])


def add_device_hint(error: BaseException, device: object) -> None:
    """Add a hint to torch's error about tensors on different devices; ignore other errors.

    Args:
        error: Exception that ends a session.
        device: Device of the session.
    """
    if isinstance(error, RuntimeError) and "tensors to be on the same device" in str(error):
        error.add_note(
            f"hint: this session computes on {device}: prepare the model by `rt.prepare(model)`, "
            "and take batches of `rt.loader(loader)`"
        )


def install_excepthook() -> ExceptHook:
    """Make Python report an uncaught `LmcoreError` by `error_text`; return the hook.

    Other exceptions go to the previous `sys.excepthook`, without hooks of earlier calls.
    """
    hook = ExceptHook(previous_hook())
    sys.excepthook = hook
    # IPython, which handles exceptions itself, asks an exception for the lines of its report.
    setattr(LmcoreError, "_render_traceback_", _report_lines)  # noqa: B010
    return hook


def _report_lines(error: LmcoreError) -> list[str]:
    return error_text(error).split("\n")


def previous_hook() -> _Hook:
    """Return the `sys.excepthook` that was set before `install_excepthook`, or is set now."""
    hook = sys.excepthook
    return hook.own if isinstance(hook, ExceptHook) else hook


class ExceptHook:
    """Replacement of `sys.excepthook`.

    Args:
        previous: Hook for other exceptions.
        own: Hook of the program itself; None: the previous one.
    """

    def __init__(self, previous: _Hook, own: _Hook | None = None) -> None:
        self.previous, self.own = previous, own or previous

    def put_first(self) -> None:
        """Take the place of a hook that was set since; it gets the other exceptions.

        torch's process group sets one that marks each line of a message with the rank.
        """
        if sys.excepthook is not self:
            sys.excepthook = ExceptHook(sys.excepthook, self.own)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Show an uncaught exception; with several processes the first line names the rank."""
        if isinstance(error, LmcoreError):
            rank = os.environ.get("RANK", "")
            mark = f"[rank{rank}]: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            sys.stderr.write(f"{mark}{error_text(error.with_traceback(trace))}\n")
        else:
            self.previous(kind, error, trace)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if file.startswith("<frozen ") or package in _PACKAGES or package.startswith("lmcore_"):
        return False
    return not os.path.abspath(file).startswith(_installed_folders())  # noqa: PTH100


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.join(folder, "") for folder in folders})  # noqa: PTH118


def _short_path(file: str) -> str:
    """Return a path below the current folder relative to it, any other path unchanged.

    A cell of a notebook has the name that IPython shows: "Cell In[3]".
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        with contextlib.suppress(AttributeError, TypeError):  # of other versions of IPython
            kind, *name = shell.compile.format_code_name(file)
            if kind != "File":
                return " ".join([kind, *name])
    try:
        return file.removeprefix(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
    except FileNotFoundError:  # the current folder was removed
        return file
