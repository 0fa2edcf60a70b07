"""`CompilationWatch`: what is compiled during the steps of a run, and the notices about it.

A device that compiles programs while it works counts them (`Device.compilations`).  `torch.compile`
has no public count: with compiled blocks, the first step is taken to compile and no other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import counted
from lmcore.base.threads import periodically
from lmcore.contract.compilations import Compilations
from lmcore.train.compilation import compiles_blocks

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.device import Device
    from lmcore.train.step_record import StepRecord

__all__ = ["CompilationWatch"]

_THREAD = "lmcore-compiling"
_PATIENCE_SECONDS = 10.0
_PATIENCE_RATIO = 3.0
"""Longest step so far, without steps that compile, times this: a longer one is announced."""
_LOOK_SECONDS = 1.0
_SINGLE_NOTICES = 5
"""Number of notices that appear at once; later ones come with the training lines."""


@dataclass
class _Wait:
    """A step that is running: its number, its begin, and when the next notice is due."""

    step: int
    began: float
    due: float


class CompilationWatch:
    """Watch over the compilations in the steps of this process.

    Attributes:
        blocks: True if `torch.compile` compiles the blocks of the model.
    """

    def __init__(self, plan: RunPlan, device: Device, say: Callable[[str], object]) -> None:
        """Count the compilations from now on.

        Args:
            plan: The run.
            device: Device of this process.
            say: Function that shows a line.
        """
        self.blocks = compiles_blocks(plan, device)
        self._device, self._say = device, say
        self._first = self._seen = device.compiled_so_far()
        self._first_step: int | None = None
        self._wait: _Wait | None = None
        self._longest = 0.0
        self._pending: list[tuple[int, Compilations]] = []
        self._notices = 0

    @property
    def active(self) -> bool:
        """True if steps of the run may compile."""
        return self.blocks or self._seen is not None

    @property
    def total(self) -> Compilations | None:
        """Programs that the device compiled since the start; None if it does not tell."""
        now = self._device.compiled_so_far()
        return None if now is None or self._first is None else now.since(self._first)

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Announce steps that take long while the block runs, if steps may compile."""
        if not self.active:
            yield
            return
        lost = "a step that compiles for long is not announced"
        with periodically(self._look, _LOOK_SECONDS, name=_THREAD, without=lost):
            yield

    def begin_step(self, step: int) -> None:
        """Begin a step; what was compiled since the last step, as in a validation, is shown."""
        if not self.active:
            return
        if self._first_step is None:
            self._first_step = step
        between = self.take()
        if between is not None and self._notices < _SINGLE_NOTICES:
            self._notice(f"before step {step}", between)
        elif between is not None:
            self._pending.append((step, between))
        now = time.monotonic()
        patience = max(_PATIENCE_SECONDS, _PATIENCE_RATIO * self._longest)
        self._wait = _Wait(step, now, now + patience)

    def end_step(self) -> None:
        """End the wait for the step that was begun last."""
        self._wait = None

    def take(self) -> Compilations | None:
        """Return what was compiled since the last call; None if nothing was."""
        before, now = self._seen, self._device.compiled_so_far()
        if before is None or now is None or now.count <= before.count:
            return None
        self._seen = now
        return now.since(before)

    def complete(self, record: StepRecord, *compiled: Compilations | None) -> None:
        """Set the compilations of a step's record.

        Args:
            record: Record of the step, with its time.
            compiled: Programs of each part of the step; None for a part without any.
        """
        found = [one for one in compiled if one is not None]
        if found:
            record.compilations = sum(one.count for one in found)
            record.compile_seconds = sum(one.seconds for one in found)
        if found or (self.blocks and record.step == self._first_step):
            record.compiles = True
        else:
            self._longest = max(self._longest, record.step_time_ms / 1e3)

    def show(self, record: StepRecord, *, with_line: bool) -> None:
        """Show what was compiled in a step: at once, or with the next training line.

        Args:
            record: Record of the step.
            with_line: True if a training line is due.
        """
        if record.compilations is not None and record.compile_seconds is not None:
            compiled = Compilations(record.compilations, record.compile_seconds)
            self._pending.append((record.step, compiled))
        if with_line or self._notices < _SINGLE_NOTICES:
            self.show_pending()

    def show_pending(self) -> None:
        """Show in one line what is not shown yet."""
        if not self._pending:
            return
        (first, _), (last, _) = self._pending[0], self._pending[-1]
        count = sum(one.count for _, one in self._pending)
        seconds = sum(one.seconds for _, one in self._pending)
        self._pending.clear()
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        self._notice(where, Compilations(count, seconds))

    def _notice(self, where: str, compiled: Compilations) -> None:
        self._notices += 1
        took = f"{compiled.seconds:.{0 if compiled.seconds >= 10 else 1}f} s"
        programs = counted(compiled.count, "program")
        self._say(f"compile   {where}: the device compiled {programs} in {took}")

    def _look(self) -> None:
        """Show that the step that is running takes long, and again when its time has doubled."""
        wait, now = self._wait, time.monotonic()
        if wait is None or now < wait.due:
            return
        is_first = wait.step == self._first_step
        if not is_first and self._seen is None:
            return  # compiled blocks, which the first step has compiled
        elapsed = now - wait.began
        wait.due = wait.began + 2 * elapsed
        guess = "probably" if is_first else "possibly"
        self._say(
            f"compile   step {wait.step} has been running for {elapsed:.0f} s: the device is "
            f"{guess} compiling"
        )
