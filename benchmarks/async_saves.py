"""Cost of saves for the steps of a loop, with and without `--async-save`; for `checkpoint.py`."""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from lmcore.train.resume.saver import Saver
    from lmcore.train.resume.snapshot import Snapshot

__all__ = ["report_saves"]

STEPS = 20
"""Number of steps that are timed without a save, and at least after one."""


class Loop:
    """A loop of steps that saves as a run does.

    A step is products of matrices, in the place of forward and backward pass, and the update of
    float32 weights by the run's AdamW.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(self, folder: Path, megabytes: int) -> None:
        """Create weights, gradients and moments.

        Args:
            folder: Folder for the checkpoints.
            megabytes: Size of weights and moments together, in 10^6 bytes.
        """
        import torch
        from checkpoint import model_like
        from torch import nn

        from lmcore.accelerator import buffer_stager
        from lmcore.accelerator.op.records import load_target
        from lmcore.checkpoint import WritePlanner
        from lmcore.optim.adamw import AdamW
        from lmcore.optim.optimizer import parameter_groups
        from lmcore_cpu.device import create_device
        from lmcore_cpu.kernels import KERNELS

        self._folder = folder
        self._matrix = torch.randn(2048, 2048)
        self._weights = {name: nn.Parameter(x) for name, x in model_like(megabytes // 3).items()}
        for weight in self._weights.values():
            weight.grad = torch.randn_like(weight)
        update = load_target(next(one.load for one in KERNELS if one.op == "adamw"))
        groups = parameter_groups(self._weights.items(), 0.1)
        self.optimizer = AdamW(groups, update, betas=(0.9, 0.95), epsilon=1e-8, owns_weights=True)
        self._stager, self._planner = buffer_stager(create_device()), WritePlanner()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and state by checkpoint name."""
        found = {f"model.{name}": weight.detach() for name, weight in self._weights.items()}
        state = self.optimizer.state_tensors()
        return found | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def changed_by_optimizer(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self.tensors())

    def step(self) -> None:
        """Compute and update."""
        for _ in range(4):
            self._matrix @ self._matrix
        self.optimizer.step(1e-4)

    def take(self, *, background: bool) -> Snapshot:
        """Return a snapshot, of copies or released tensors if it is written in the background."""
        from lmcore.accelerator import PendingCopy
        from lmcore.runtime.process.channel import Channel
        from lmcore.train.resume.snapshot import Snapshot, begin_copy

        plan = self._planner.plan(self.tensors(), {})
        views = plan.views(self.tensors())
        copy = PendingCopy(views)
        if background:
            names = {key: name for key, (name, _) in plan.own.items()}
            copy = begin_copy(self._stager, self, views, names)  # type: ignore[arg-type]
        return Snapshot(self._folder / "async", 1, copy, {}, {}, 1, None, (), plan, Channel(None))


def report_saves(folder: Path, megabytes: int, repeats: int, num_threads: int) -> None:
    """Print what a save costs the steps of a loop, with and without `--async-save`.

    What a step loses is the time from the call of the save to the end of the next update, less a
    step without a save: the median of the steps before it.  Steps are timed until the save is
    complete.  A machine is disturbed by others, too, so the longest step is looked for among the
    medians, over the saves, of the steps at the same place after a save.

    Args:
        folder: Folder for the checkpoints.
        megabytes: Size of weights and moments together, in 10^6 bytes.
        repeats: Number of saves of each kind.
        num_threads: Threads of a step; with fewer than the processors the writer has one.
    """
    import torch
    from checkpoint import seconds

    from lmcore.train.resume.saver import Saver

    loop = Loop(folder, megabytes)
    size = sum(tensor.nbytes for tensor in loop.tensors().values()) / 1e6
    torch.set_num_threads(num_threads)
    loop.step()
    plain = [seconds(loop.step)[0] for _ in range(2 * STEPS)]
    usual = statistics.median(plain)
    print(
        f"{size:.0f} MB of weights and moments; steps of {num_threads} threads on "
        f"{os.cpu_count()} processors take {usual:.3f} s without a save, the longest of "
        f"{len(plain)} {max(plain) / usual:.2f}x of that"
    )

    def saver(*, background: bool) -> Saver:
        return Saver(functools.partial(loop.take, background=background), background=background)

    synchronous, asynchronous = (
        save_cost(functools.partial(saver, background=background), loop.step, repeats)
        for background in (False, True)
    )
    for name, cost in (("synchronous", synchronous), ("asynchronous", asynchronous)):
        print(
            f"{name} save: the step loses {cost.loss:.3f} s, {cost.loss / synchronous.loss:.1%} "
            f"of a synchronous save (the call {cost.call:.3f} s); the steps after it take "
            f"{cost.slower:.2f}x of one without a save, the longest of the first {STEPS} "
            f"{cost.longest_place:.2f}x at its place and {cost.longest:.2f}x after a single save; "
            f"all together lose {cost.total:.3f} s"
        )
    print(f"it is complete after {asynchronous.complete:.1f} s; ", end="")
    print(f"a copy of the bytes takes `memmove` {memmove_seconds(loop.tensors()):.3f} s")


class SaveCost(NamedTuple):
    """Cost of saves for a loop: medians over the saves.

    Attributes:
        call: Seconds of the call.
        loss: Seconds that the step after it ends later than without a save.
        slower: Time of the later steps, in steps without a save.
        longest_place: The longest of the first `STEPS` later steps, in steps without a save, when
            each is the median of the steps at its place.
        longest: The longest of those after one save.
        total: Seconds that all steps lose until the save is complete.
        complete: Seconds from the call until then.
    """

    call: float
    loss: float
    slower: float
    longest_place: float
    longest: float
    total: float
    complete: float


class Observed(NamedTuple):
    """Times of one save in seconds: the call, its loss, the end, and the later steps over plain."""

    call: float
    loss: float
    total: float
    complete: float
    later: list[float]


def save_cost(make_saver: Callable[[], Saver], step: Callable[[], None], repeats: int) -> SaveCost:
    """Return the cost of saves.

    Args:
        make_saver: Returns a saver whose checkpoint is absent.
        step: A step, with its update.
        repeats: Number of saves; one more comes first, which takes the memory.
    """
    seen = [observe_save(make_saver(), step) for _ in range(repeats + 1)][1:]
    places = zip(*(one.later[:STEPS] for one in seen), strict=True)
    return SaveCost(
        call=statistics.median(one.call for one in seen),
        loss=statistics.median(one.loss for one in seen),
        slower=statistics.median(ratio for one in seen for ratio in one.later),
        longest_place=max(map(statistics.median, places)),
        longest=statistics.median(max(one.later[:STEPS]) for one in seen),
        total=statistics.median(one.total for one in seen),
        complete=statistics.median(one.complete for one in seen),
    )


def observe_save(saver: Saver, step: Callable[[], None]) -> Observed:
    """Save, time the steps until the checkpoint is complete, and delete it."""
    from checkpoint import seconds

    os.sync()
    plain = statistics.median(seconds(step)[0] for _ in range(STEPS // 2))
    start = time.perf_counter()
    target = saver.save()
    call = time.perf_counter() - start
    step()
    loss = time.perf_counter() - start - plain
    steps = [seconds(step)[0] for _ in range(STEPS)]
    while not target.exists():
        steps.append(seconds(step)[0])
    complete = time.perf_counter() - start
    saver.wait()
    shutil.rmtree(target)
    total = loss + sum(steps) - len(steps) * plain
    return Observed(call, loss, total, complete, [one / plain for one in steps])


def memmove_seconds(tensors: dict[str, torch.Tensor]) -> float:
    """Return the time of a copy of as many bytes in memory, without torch; the median of five."""
    source = bytearray(sum(tensor.nbytes for tensor in tensors.values()))
    target = bytearray(len(source))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        memoryview(target)[:] = source
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
