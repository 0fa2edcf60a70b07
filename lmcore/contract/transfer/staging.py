"""`CheckpointStager`: transfer of a run's tensors to host memory before a checkpoint is written.

A checkpoint must hold the state of one step.  With a stager that copies, training continues while
the copy is written (`--async-save`); with one that returns the live tensors, training waits for the
save.  A stager that can begin a copy and end it later lets training compute meanwhile, until it
changes the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcore.base.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CheckpointStager",
    "PendingCopy",
    "begin_staging",
    "host_copy_stager",
    "stage_tensors",
]


def _nothing() -> None:
    """Do nothing: the copy is done."""


@dataclass(frozen=True)
class PendingCopy:
    """A copy to host memory that has begun.

    Attributes:
        tensors: Host tensors by name; they have the values after `finish`.
        end_reads: Called on the training thread before anything changes the tensors that are
            copied, or queues their change; returns when it may.  A failed copy is no error here.
        finish: Called on the thread that writes the checkpoint, at once; returns when `tensors`
            have the values.  Raises if the copy failed.  It may be called again.
    """

    tensors: Mapping[str, Tensor]
    end_reads: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing


@dataclass(frozen=True)
class CheckpointStager:
    """A way to bring tensors to host memory.

    Attributes:
        name: name in records and messages.
        stage: Returns the tensors by the same names, with the same values, on the host; called on
            the training thread, and never while an earlier result is still being written.
        priority: The highest that is available is used.
        available: Returns None, or the reason why it cannot be used here.
        copies: True if the result of `stage` does not change when training continues; False if the
            live tensors themselves may be returned.
        plugin: Name of the plugin, "lmcore" for the core's own; filled in by the core.
        begin: Begins what `stage` does, called in its place with tensors that do not change before
            `PendingCopy.end_reads` is called: until then training only reads them, on its
            thread and the current stream of the device.  None: training waits for `stage`.
    """

    name: str
    stage: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    priority: int = 0
    available: Callable[[], str | None] = lambda: None
    copies: bool = True
    plugin: str = ""
    begin: Callable[[Mapping[str, Tensor]], PendingCopy] | None = None


def host_copy_stager() -> CheckpointStager:
    """Return `host-copy`, the core's own: a new host tensor for each tensor, on any device."""
    return CheckpointStager("host-copy", _copy_to_host, plugin="lmcore")


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def stage_tensors(stager: CheckpointStager, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return *tensors* as *stager* brings them to the host; its result is checked.

    Raises:
        PluginError: A tensor is missing, of another shape or dtype, not on the host, or,
            although the stager declares `copies`, still the live tensor.
    """
    staged = dict(stager.stage(tensors))
    _check(stager, tensors, staged)
    return staged


def begin_staging(
    stager: CheckpointStager, tensors: Mapping[str, Tensor], lasting: Collection[str]
) -> PendingCopy:
    """Begin to bring *tensors* to the host, and check what the stager will fill.

    Args:
        stager: Stager that copies.
        tensors: Tensors by name.
        lasting: Names of the tensors that do not change before the caller calls `end_reads` of the
            result; all others are copied before this returns.

    Raises:
        PluginError: See `stage_tensors`.
    """
    copied_later = {name: tensor for name, tensor in tensors.items() if name in lasting}
    if stager.begin is None or not copied_later:
        return PendingCopy(stage_tensors(stager, tensors))
    others = {name: tensor for name, tensor in tensors.items() if name not in lasting}
    pending = stager.begin(copied_later)
    if not isinstance(pending, PendingCopy):
        raise _broken(stager, f"`begin` returned {pending!r:.80}, no `PendingCopy`")
    _check(replace(stager, copies=True), copied_later, pending.tensors)
    watched = _WatchedCopy(pending, copied_later)
    staged = {**pending.tensors, **stage_tensors(host_copy_stager(), others)}
    return PendingCopy(staged, watched.end_reads, watched.finish)


class _WatchedCopy:
    """A pending copy that fails if its tensors change before `end_reads`.

    torch counts the changes of a tensor in place.  A step that changes weights without a call of
    `end_reads` is a bug, which would leave numbers of two steps in one checkpoint.
    """

    def __init__(self, pending: PendingCopy, tensors: Mapping[str, Tensor]) -> None:
        self._pending = pending
        self._before = [
            (name, tensor, _num_changes(tensor))
            for name, tensor in tensors.items()
            if not tensor.is_inference()
        ]
        self._may_change = self._finished = False
        self._fault: str | None = None

    def end_reads(self) -> None:
        """Wait, and let changes begin."""
        if self._may_change:
            return
        self._pending.end_reads()
        if not self._finished:
            self._fault = self._changed()
        self._may_change = True

    def finish(self) -> None:
        """Wait for the values.

        Raises:
            CheckpointError: The tensors have changed meanwhile.
            Exception: The copy failed.
        """
        self._pending.finish()
        if self._finished:
            return
        changed = self._changed()  # before the question whether it may have
        fault = self._fault if self._may_change else changed
        if fault is not None:
            raise CheckpointError(
                f"`{fault}` changed while it was copied for a checkpoint",
                why="the step did not wait for the copy before it changed its weights (a bug)",
                hint="report this to the authors of lmcore; without `--async-save` nothing is "
                "copied meanwhile",
            )
        self._finished = True
        self._before = []

    def _changed(self) -> str | None:
        """Return the name of a tensor that has changed; None if there is none."""
        changed = (name for name, tensor, before in self._before if _num_changes(tensor) != before)
        return next(changed, None)


def _num_changes(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - no public name


def _check(
    stager: CheckpointStager, tensors: Mapping[str, Tensor], staged: Mapping[str, Tensor]
) -> None:
    """Raise PluginError unless *staged* are *tensors* on the host."""
    if staged.keys() != tensors.keys():
        odd = sorted(staged.keys() ^ tensors.keys())[:4]
        raise _broken(stager, f"it did not return exactly the tensors it got: {', '.join(odd)}")
    for name, live in tensors.items():
        copy = staged[name]
        if copy.shape != live.shape or copy.dtype != live.dtype:
            raise _broken(
                stager,
                f"`{name}` is {live.dtype} {tuple(live.shape)}, it returned {copy.dtype} "
                f"{tuple(copy.shape)}",
            )
        if copy.device.type != "cpu":
            raise _broken(stager, f"it left `{name}` on {copy.device}")
        if stager.copies and copy.numel() and _shares_memory(copy, live):
            raise _broken(stager, f"it declares `copies`, and returned `{name}` itself")


def _shares_memory(first: Tensor, other: Tensor) -> bool:
    return (
        first.device == other.device
        and first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _broken(stager: CheckpointStager, why: str) -> PluginError:
    return PluginError(
        f"checkpoint stager `{stager.name}` did not do its work; nothing was written",
        why=why,
        hint="update the plugin that offers it, or report this to its authors",
    )
