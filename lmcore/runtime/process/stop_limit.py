"""Limit on the time that a process takes to stop, if a call of its device does not return.

Python handles a signal when the main thread returns to Python code, which a call of a hung device
never does.  So a guard, a small separate process (`stop_guard`), gets each signal from Python's
handler in C, and a thread of this process then looks whether the main thread makes progress: if it
stays in one call for longer than the limit, the thread ends the process.  Native code that keeps
Python's global lock stops that thread, too; then the guard kills the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from lmcore.base.errors import RunError, counted, printable
from lmcore.base.signals import end_status
from lmcore.base.threads import start_optional
from lmcore.runtime.launch.worker_protocol import Report, launch_info, write_report
from lmcore.runtime.process import stop_guard
from lmcore.runtime.process.watch import IDLE_THREADS, STOP_THREAD, calls_of

__all__ = ["StopLimit"]

logger = logging.getLogger(__name__)

_REPEATED_SECONDS = 5.0
"""Limit after a second signal: the user wants the run to end at once."""
_END_SECONDS = 2.0
_CLOSED = -1
_SHOWN_CALLS = 4
_WAITS = ("threading.py", "queue.py", "_base.py")
"""Files of Python whose functions wait for other threads."""


class StopLimit:
    """Context manager; within it, a signal or a failure elsewhere ends the process in limited time.

    To be used in the main thread.  If another part of the program gets Python's signals already, or
    the system gives no process, there is no limit.

    Args:
        seconds: Longest time that one call may take after the request to stop; 0: no limit.
        setting: Setting that changes the limit, for the message.

    Attributes:
        activity: Function that returns the work of this process, such as "step 7 on `chip:0`".
        ended: Function that is called, in another thread, with the error that ends the process.
    """

    def __init__(self, seconds: float, setting: str = "--stop-timeout-minutes") -> None:
        self.activity: Callable[[], str] = lambda: "the start of the run"
        self.ended: Callable[[RunError], object] = lambda error: None
        self._seconds, self._setting = seconds, setting
        self._main = threading.get_ident()
        self._cause = ""
        self._guard: subprocess.Popen[bytes] | None = None
        self._to_guard = self._from_guard = _CLOSED

    def __enter__(self) -> Self:
        """Start the guard and the thread."""
        if not self._seconds or threading.current_thread() is not threading.main_thread():
            return self
        other = signal.set_wakeup_fd(-1)
        if other != -1:
            signal.set_wakeup_fd(other)
            return self
        try:
            self._start_guard()
        except OSError as error:
            logger.warning(
                "the end of this process has no time limit: no process can be started (%s)", error
            )
            return self
        signal.set_wakeup_fd(self._to_guard, warn_on_full_buffer=False)
        _open.add(self)
        thread = threading.Thread(target=self._answer, name=STOP_THREAD, daemon=True)
        start_optional(thread, without="a call that hangs when the run ends is not shown")
        return self

    def __exit__(self, *_: object) -> None:
        """End guard and thread."""
        if self._to_guard == _CLOSED or self._guard is None:
            return
        signal.set_wakeup_fd(-1)
        self.leave()
        try:
            self._guard.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        os.close(self._from_guard)  # the thread's copy ends with the guard

    def leave(self) -> None:
        """Close the pipe to the guard, which ends when no process has it any more."""
        _open.discard(self)
        os.close(self._to_guard)
        self._to_guard = _CLOSED

    def request(self, cause: str) -> None:
        """Begin the limit as a signal does.

        Args:
            cause: Cause for the message, such as "the failure of another process".
        """
        self._cause = self._cause or cause
        self._send(stop_guard.REQUEST)

    def withdraw(self) -> None:
        """End the limit that a signal began: the program continues after it, as a dialogue does."""
        if self._to_guard != _CLOSED:
            self._cause = ""
            self._send(stop_guard.WITHDRAWN)

    def _start_guard(self) -> None:
        reading, self._to_guard = os.pipe()
        self._from_guard, writing = os.pipe()
        os.set_blocking(self._to_guard, False)
        program = str(Path(stop_guard.__file__))
        limits = (str(self._seconds), str(_REPEATED_SECONDS))
        try:
            self._guard = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [sys.executable, "-I", "-S", program, *limits, str(reading), str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(reading, writing),
                start_new_session=True,
            )
        except OSError:
            os.close(self._to_guard)
            os.close(self._from_guard)
            raise
        finally:
            os.close(reading)
            os.close(writing)

    def _send(self, message: int) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            os.write(self._to_guard, bytes([message]))

    def _answer(self) -> None:
        """Answer the guard as long as the main thread makes progress; end the process otherwise."""
        seen: list[tuple[FrameType, int]] = []
        since, limit = time.monotonic(), self._seconds
        with os.fdopen(os.dup(self._from_guard), "rb", buffering=0) as questions:
            while question := questions.read(1):
                now, number = time.monotonic(), question[0] & ~stop_guard.HURRY
                hurries = question[0] & stop_guard.HURRY
                wanted = _REPEATED_SECONDS if hurries else self._seconds
                if wanted != limit:
                    since, limit = now, wanted
                places = self._places()
                if places != seen:
                    since, seen = now, places
                if now - since > limit:
                    self._end(limit, number)
                self._send(stop_guard.ALIVE)

    def _places(self) -> list[tuple[FrameType, int]]:
        """Return the frame of the main thread and its instruction; of others that it waits for.

        The frames are kept until the next look, so that a later call is another frame.
        """
        frames = sys._current_frames()  # noqa: SLF001
        main = frames[self._main]
        places = [(main, main.f_lasti)]
        if Path(main.f_code.co_filename).name in _WAITS:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            others = [frame for id_, frame in frames.items() if names.get(id_) not in IDLE_THREADS]
            places += [(frame, frame.f_lasti) for frame in others]
        return places

    def _end(self, limit: float, number: int) -> None:
        """End the process with an error that shows the call of the main thread.

        Args:
            limit: Limit that has passed, in seconds.
            number: Number of the signal; 0: it was requested.
        """
        cause = signal.Signals(number).name if number else self._cause
        stack = traceback.extract_stack(sys._current_frames()[self._main])  # noqa: SLF001
        calls = "\n".join(reversed(calls_of(stack)[-_SHOWN_CALLS:]))
        took = f"{limit / 60:g} minutes" if limit > 60 else counted(limit, "second")
        error = RunError(
            f"{self.activity()} did not end within {took} of {cause}",
            why=f"a call of the main thread does not return:\n{calls}",
            hint=f"the device may hang: `lmcore doctor` tests it; `{self._setting}` changes the "
            "limit",
        )
        status = end_status(number) if number else error.exit_status
        try:
            with contextlib.suppress(Exception):  # a broken report must not keep the process
                self.ended(error)
            if launch_info(os.environ).report_file:
                report = Report(time.time(), error.render(), status, secondary=False)
                write_report(report, os.environ)
            else:
                notes = "".join(f"\n{note}\n" for note in getattr(error, "__notes__", ()))
                sys.stderr.write(printable(f"{error.render()}\n{notes}"))
                sys.stderr.flush()
        finally:
            os._exit(status)


_open: weakref.WeakSet[StopLimit] = weakref.WeakSet()


def _leave_in_fork() -> None:
    """Give up the guard in a forked process, which gets signals itself."""
    for limit in list(_open):
        signal.set_wakeup_fd(-1)
        limit.leave()


os.register_at_fork(after_in_child=_leave_in_fork)
