"""Checkpoints of a run: its state at one step, taken to the host, then written by all ranks.

They are written at once, or in a thread while training continues.  A checkpoint is complete or
absent, and no two are written at the same time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcore.base.errors import CheckpointError, LmcoreError
from lmcore.base.idle_work import idle_work_waited_for
from lmcore.base.signals import TerminatedError
from lmcore.base.threads import lower_priority, start_optional
from lmcore.checkpoint import WritePlanner, save_checkpoint
from lmcore.checkpoint.choice import BEST_KEY
from lmcore.checkpoint.layout import iteration_path
from lmcore.checkpoint.save import TIMED
from lmcore.config.file.paths import absolute_paths
from lmcore.contract.device_errors import first_line
from lmcore.contract.transfer.staging import PendingCopy, begin_staging, stage_tensors
from lmcore.parallel.random_states import named_random_states
from lmcore.train.diagnose.non_finite import check_copies, check_weights
from lmcore.train.resume.corpora import KEY as CORPORA_KEY
from lmcore.train.resume.validation_history import KEY, ValidationHistory

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.checkpoint import WritePlan
    from lmcore.config.plan import RunPlan
    from lmcore.contract import CheckpointStager
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

logger = logging.getLogger(__name__)

WRITER_NAME = "lmcore-checkpoint-writer"

_WEIGHT = "model."


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one step, on the host or on its way there.

    Attributes:
        directory: Folder of the checkpoints.
        iteration: Number of steps done.
        copy: Chunks of weights, optimizer and random states that this rank writes, by key.
        meta: State that is not in tensors, for the manifest.
        model_shape: Shape of the model, for the manifest.
        keep_last: Number of checkpoints to keep; None to keep all.
        keep_every: Checkpoints of multiples of this step are kept besides; None for none.
        damaged: Checkpoints that are known to be damaged and do not count as kept.
        write_plan: Chunks that this rank writes.
        channel: Channel between the ranks for this save.
        checked: True if the weights are known to be finite.
    """

    directory: Path
    iteration: int
    copy: PendingCopy
    meta: Mapping[str, Any]
    model_shape: Mapping[str, Any]
    keep_last: int | None
    keep_every: int | None
    damaged: tuple[Path, ...]
    write_plan: WritePlan
    channel: Channel
    checked: bool = False

    def write(self) -> Path:
        """Write the checkpoint and return its directory; all processes must call it.

        With `--async-save` it is called at once, in a thread: it ends the copy of the tensors, and
        checks the weights that this rank writes.

        Raises:
            NonFiniteError: A weight is NaN or infinite; nothing was saved.
            CheckpointError: The checkpoint could not be written; earlier ones are unchanged.
            OtherRankError: Another rank could not write its part.
        """
        failure: Exception | None = None
        try:
            self.copy.finish()
            if not self.checked:
                check_copies(self._weights(), self.iteration)
        except LmcoreError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - of the device, or of a plugin
            failure = CheckpointError(
                f"could not save the checkpoint of iteration {self.iteration}",
                why=f"its tensors could not be copied to the host: {first_line(error)}",
            )
            failure.__cause__ = error
        return save_checkpoint(
            self.directory,
            self.iteration,
            self.copy.tensors,
            self.meta,
            model_shape=self.model_shape,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            damaged=self.damaged,
            plan=self.write_plan,
            channel=self.channel,
            failure=failure,
        )

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of weights, and the parts of them that this rank writes."""
        for key, (name, _) in self.write_plan.own.items():
            if name.startswith(_WEIGHT):
                yield name.removeprefix(_WEIGHT), self.copy.tensors[key]


def take_snapshot(
    state: TrainState,
    plan: RunPlan,
    runtime: Runtime,
    tokenizer: Tokenizer,
    *,
    directory: Path,
    order: str,
    data: Mapping[str, Any] | None = None,
    corpora: Mapping[str, str] | None = None,
    history: ValidationHistory | None = None,
    planner: WritePlanner | None = None,
) -> Snapshot:
    """Copy the part of *state* that this rank writes to the host; all processes must call it.

    With `--async-save`, and a stager that can, the copy of what the optimizer changes has only
    begun: the optimizer waits for its end before its next change.  See `begin_copy`.  The weights
    are then checked by `Snapshot.write`.

    Take and write a snapshot within `state.evaluation_weights`: the run's stager may return the
    live tensors.

    Args:
        state: State of the run.
        plan: The run; its `checkpoint` section selects optimizer and random states.
        runtime: Stager and random states.
        tokenizer: Tokenizer of the data.
        directory: Folder of the checkpoints.
        order: Fingerprint of the training samples' order.
        data: Record of the data sources, from `RunDatasets.record`.
        corpora: Digest of each corpus by name; None in a run without.
        history: Validation losses of the run; None in a run without validation.
        planner: Write planner of the run, with its channels; None in a run of one process.

    Raises:
        NonFiniteError: A weight is NaN or infinite; without `--async-save`.
        PluginError: The stager returned wrong tensors.
    """
    asked = plan.config.checkpoint
    if not asked.async_save:
        check_weights(state)
    tensors = state.tensors(optimizer=asked.save_optim)
    layouts = state.layouts(tensors)
    if asked.save_rng:
        tensors |= named_random_states(runtime)
    planner = planner or WritePlanner()
    write_plan = planner.plan(tensors, layouts)
    meta: dict[str, Any] = {
        "counters": state.counters(),
        "schedule": state.schedule_settings(),
        "loss_scale": state.loss_scale.state(),
        **_of_data(order, data, corpora or {}),
        "seed": plan.config.training.seed,
        "layout": dataclasses.asdict(plan.layout),
        "precision": runtime.precision.name,
        "config": plan.to_dict() | {"config": _settings(plan)},
        "tokenizer": {"describe": tokenizer.describe(), "fingerprint": tokenizer.fingerprint()},
    }
    if history is not None and history.best_step is not None:
        meta |= _of_validations(history, best=asked.save_best, step=state.iteration)
    runtime.device.step_boundary()
    views = write_plan.views(tensors)
    if asked.async_save:
        names = {key: name for key, (name, _) in write_plan.own.items()}
        copy = begin_copy(runtime.stager, state, views, names)
    else:
        copy = PendingCopy(stage_tensors(runtime.stager, views))
    return Snapshot(
        directory,
        state.iteration,
        copy,
        meta,
        state.parallel.shape.to_dict(),
        asked.keep_last,
        asked.keep_every,
        plan.resume.damaged if plan.resume is not None else (),
        write_plan,
        planner.saves,
        checked=not asked.async_save,
    )


def begin_copy(
    stager: CheckpointStager,
    state: TrainState,
    views: Mapping[str, Tensor],
    names: Mapping[str, str],
) -> PendingCopy:
    """Begin to copy the part of *state* that a checkpoint is written from, and return at once.

    What the optimizer releases is not copied; before it changes what it does not, it waits for the
    copy.

    Args:
        stager: Stager that copies.
        state: State of the run.
        views: Views of its tensors, and other tensors, by key.
        names: Names of the state's tensors, by key.
    """
    found = state.optimizer.release_state()
    released = {f"model.{name}" for name in found.parameters}
    released |= {f"optimizer.{name}" for name in found.state}
    kept = {key: view for key, view in views.items() if names.get(key) in released}
    copied = {key: view for key, view in views.items() if key not in kept}
    lasting = state.changed_by_optimizer()
    copy = begin_staging(stager, copied, {key for key in copied if names.get(key) in lasting})
    state.optimizer.before_next_change(copy.end_reads)
    return dataclasses.replace(copy, tensors={**copy.tensors, **kept})


def _of_data(
    order: str, data: Mapping[str, Any] | None, corpora: Mapping[str, str]
) -> dict[str, Any]:
    """Return the entries of a checkpoint about training samples and the files they are from."""
    found: dict[str, Any] = {"data_order": order, "data": data}
    return found | ({CORPORA_KEY: dict(corpora)} if corpora else {})


def _of_validations(history: ValidationHistory, *, best: bool, step: int) -> dict[str, Any]:
    """Return the entries of a checkpoint about validations, and whether its own was the best."""
    is_best = best and history.best_step == step
    return {KEY: history.to_dict()} | ({BEST_KEY: True} if is_best else {})


def _settings(plan: RunPlan) -> dict[str, Any]:
    """Return every setting by section, with absolute paths as in the run's `config.yaml`."""
    settings = dataclasses.asdict(plan.config)
    for option in plan.options.values():
        if option.paths is not None:
            plugin, section = option.plugin, option.section
            values = settings["plugins"][plugin] if plugin else settings[section]
            values[option.key] = absolute_paths(option, plan.value(option))
    return settings


class Saver:
    """Context manager that waits at its exit for the checkpoint that is being written."""

    def __init__(self, take: Callable[[], Snapshot], *, background: bool) -> None:
        """Write nothing yet.

        Args:
            take: Returns a snapshot of the run's state; called on the training thread, never while
                an earlier snapshot is being written.
            background: True to write in a thread (`--async-save`).
        """
        self.take = take
        self.background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, *, timed: bool = False) -> Path:
        """Save the current state and return the directory of the checkpoint.

        All processes must call it.  Waits for an earlier checkpoint first.

        Args:
            timed: True for a checkpoint of `--save-interval-mins`, which the second save after it
                deletes unless `--keep-last` is given.

        Raises:
            CheckpointError: This checkpoint, or the earlier one, could not be written.
            OtherRankError: Another rank could not write its part.
        """
        self.wait()
        snapshot = self.take()
        if timed:
            snapshot = dataclasses.replace(snapshot, meta={**snapshot.meta, TIMED: True})
        if not self.background:
            return snapshot.write()
        # A daemon: a second interrupt ends the run at once, without the unfinished checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name=WRITER_NAME, daemon=True
        )
        if not start_optional(self._thread, without="training waits for the checkpoint"):
            self._thread = None
            return snapshot.write()
        return iteration_path(snapshot.directory, snapshot.iteration)

    def raise_background_error(self) -> None:
        """Raise the error of the last checkpoint, if it failed; do not wait for it.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._thread is not None:
            with idle_work_waited_for():
                self._thread.join()
            self._thread = None
        self.raise_background_error()

    def _write(self, snapshot: Snapshot) -> None:
        lower_priority()  # the training step goes first
        try:
            snapshot.write()
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            self._error = error

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait, unless the user interrupts; an error of the run takes precedence over its own."""
        if kind is None:
            self.wait()
        elif not issubclass(kind, (KeyboardInterrupt, TerminatedError)):
            try:
                self.wait()
            except Exception as failure:  # noqa: BLE001 - the run ends with its own error
                logger.warning("the last checkpoint was not written: %s", failure)
