"""Snapshots: the state of a run at one step, on the host, to be written by all ranks together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.device_errors import first_line
from lmcore.accelerator.transfer.staging import PendingCopy, begin_staging, stage_tensors
from lmcore.checkpoint import WritePlanner, save_checkpoint
from lmcore.checkpoint.choice import BEST_KEY
from lmcore.config.file.paths import absolute_paths
from lmcore.errors import CheckpointError, LmcoreError
from lmcore.parallel.random_states import named_random_states
from lmcore.train.diagnose.non_finite import check_copies, check_weights
from lmcore.train.resume.validation_history import KEY, ValidationHistory

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.accelerator import CheckpointStager
    from lmcore.checkpoint import WritePlan
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["Snapshot", "begin_copy", "take_snapshot"]

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
        "data_order": order,
        "data": data,
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
