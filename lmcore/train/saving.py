"""A run's state to and from checkpoints, and what must agree for a run to go on.

A run that continues is the same run or an error: the model's shape, the schedule and the order of
the data are compared with those of the checkpoint before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.staging import stage_tensors
from lmcore.checkpoint import (
    check_shape,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from lmcore.errors import CheckpointError, ConfigError
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.state import (
    all_random_states,
    random_state_name,
    random_states,
    set_random_states,
)
from lmcore.train.step import check_weights

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import RunPlan
    from lmcore.data.sampler import Ordered
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["Snapshot", "data_order", "restore", "take_snapshot"]

logger = logging.getLogger(__name__)

_NOT_IN_THE_WEIGHTS = ("init_method_std", "attention_dropout", "hidden_dropout")
"""Parts of a model's shape that a run may change when it goes on."""

_SCHEDULE_OPTIONS = {
    "style": "lr_decay_style",
    "highest": "lr",
    "lowest": "min_lr",
    "warmup_samples": "lr_warmup_samples",
    "decay_samples": "lr_decay_samples",
    "cooldown_fraction": "lr_cooldown_fraction",
}
"""What the user calls the numbers of a schedule."""


def data_order(dataset: Ordered) -> str:
    """Return a fingerprint of the order in which a dataset gives its samples.

    It is equal for two data sets whose samples are the same in the same order, however many of
    them a run is to use; no sample is read for it.
    """
    return dataset.order


@dataclass(frozen=True)
class Snapshot:
    """One moment of a run, on the host and ready to be written.

    Attributes:
        directory: Where checkpoints are.
        iteration: Steps done.
        tensors: Weights, optimizer and random states.
        meta: What is no tensor.
        model_shape: The model's numbers.
        keep_last: Checkpoints that stay.
    """

    directory: Path
    iteration: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    model_shape: Mapping[str, Any]
    keep_last: int | None

    def write(self) -> Path:
        """Write the checkpoint and return its directory.

        Raises:
            CheckpointError: It could not be written; earlier checkpoints are as they were.
        """
        return save_checkpoint(
            self.directory,
            self.iteration,
            self.tensors,
            self.meta,
            model_shape=self.model_shape,
            keep_last=self.keep_last,
        )


def take_snapshot(
    state: TrainState,
    plan: RunPlan,
    runtime: Runtime,
    tokenizer: Tokenizer,
    *,
    directory: Path,
    order: str,
    data: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Bring *state* to the host as the run's stager does it; all processes must call it.

    The weights are those that the model holds: take and write it within `state.weights_for_use`,
    as the stager may hand out the live ones.
    Only rank 0's has tensors: the others hold the same, but for their random states.

    Raises:
        NotFiniteError: A weight is NaN or infinite.
        PluginError: The stager did not do its work.
    """
    asked = plan.config.checkpoint
    check_weights(state)
    tensors = state.tensors(optimizer=asked.save_optim)
    if asked.save_rng:
        tensors |= all_random_states(runtime)
    if runtime.rank.rank != 0:
        tensors = {}
    meta: dict[str, Any] = {
        "counters": state.counters(),
        "schedule": state.schedule_settings(),
        "loss_scale": state.loss_scale.state(),
        "data_order": order,
        "data": data,
        "seed": plan.config.training.seed,
        "config": plan.to_dict(),
        "tokenizer": {"describe": tokenizer.describe(), "fingerprint": tokenizer.fingerprint()},
    }
    return Snapshot(
        directory,
        state.iteration,
        stage_tensors(runtime.stager, tensors),
        meta,
        state.model.shape.to_dict(),
        asked.keep_last,
    )


def restore(state: TrainState, plan: RunPlan, runtime: Runtime, *, order: str) -> Path | None:
    """Bring *state* to where the checkpoint of `--load` left it; return that checkpoint.

    Args:
        state: A fresh state.
        plan: Says from where, and what of it.
        runtime: Gets the random states.
        order: `data_order` of this run's training samples.

    Raises:
        CheckpointError: None is there, or it is damaged or of another shape.
        ConfigError: The run would not be the same one.
    """
    asked = plan.config.checkpoint
    if asked.load is None:
        return None
    try:
        checkpoint = find_checkpoint(Path(asked.load))
    except CheckpointError as error:
        first_start = asked.save is not None and Path(asked.save) == Path(asked.load)
        may_be_missing = first_start or not asked.exit_on_missing_checkpoint
        if not may_be_missing or _holds_any(Path(asked.load)):
            raise
        logger.warning("starting anew: %s", error.what)
        return None
    manifest = read_manifest(checkpoint)
    saved = manifest.model_shape
    free = {name: saved[name] for name in _NOT_IN_THE_WEIGHTS if name in saved}
    check_shape(manifest, state.model.shape.to_dict() | free)
    if asked.finetune:
        with state.weights_for_use():
            load_checkpoint(checkpoint, state.tensors(optimizer=False))
        return checkpoint
    if asked.load_optim:
        _check_optimizer(manifest, plan)
    _adopt_schedule(state, plan, manifest)
    _check_order(manifest, order, plan)
    with state.weights_for_use():
        _load(state, plan, runtime, manifest, checkpoint)
    state.set_counters(manifest.meta["counters"])
    if asked.load_optim:
        state.loss_scale.restore(manifest.meta.get("loss_scale", {}))
    return checkpoint


def _load(
    state: TrainState, plan: RunPlan, runtime: Runtime, manifest: Manifest, checkpoint: Path
) -> None:
    """Load weights, optimizer and random states, as far as *plan* asks for them."""
    asked = plan.config.checkpoint
    tensors = state.tensors(optimizer=asked.load_optim)
    states = random_states(runtime) if asked.load_rng else {}
    saved_as = {name: random_state_name(name, runtime.rank.rank) for name in states}
    if runtime.rank.rank != 0 and not manifest.tensors.keys() & saved_as.values():
        states, saved_as = {}, {}  # a process more than there were: it goes on with its seed
    named = {saved_as[name]: state for name, state in states.items()}
    _check_presence(manifest, tensors, named)
    load_checkpoint(checkpoint, tensors | named)
    if states:
        set_random_states(states, runtime)


def _holds_any(path: Path) -> bool:
    """Return whether there is a checkpoint, be it damaged: that is no reason to start anew."""
    return path.name.startswith("iter_") or any(
        any(folder.glob("iter_*")) for folder in (path, path / "checkpoints")
    )


def _check_optimizer(manifest: Manifest, plan: RunPlan) -> None:
    """Refuse another optimizer's state: it has other moments, or the same of another meaning."""
    settings = manifest.meta.get("config", {}).get("config", {}).get("optimizer", {})
    saved, now = settings.get("optimizer"), plan.config.optimizer.optimizer
    if saved in {None, now}:
        return
    raise ConfigError(
        f"the checkpoint was written with `--optimizer {saved}`, this run has `{now}`",
        why="the state of one optimizer means nothing to another",
        hint=f"use `--optimizer {saved}`, or `--no-load-optim` to go on with a new `{now}`",
    )


def _check_presence(
    manifest: Manifest, tensors: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    lacks_optimizer = any(
        name.startswith("optimizer.") and name not in manifest.tensors for name in tensors
    )
    if lacks_optimizer:
        raise CheckpointError(
            "the checkpoint has no optimizer state",
            why="it was saved with `--no-save-optim`",
            hint="add `--no-load-optim` to go on with a new optimizer",
        )
    if any(name not in manifest.tensors for name in states):
        raise CheckpointError(
            "the checkpoint has no random states for this device",
            why="it was saved with `--no-save-rng`, or on another device",
            hint="add `--no-load-rng` to go on with new ones",
        )


def _adopt_schedule(state: TrainState, plan: RunPlan, manifest: Manifest) -> None:
    saved = dict(manifest.meta["schedule"])
    asked = plan.config.checkpoint
    if asked.use_checkpoint_opt_param_scheduler:
        state.schedule = LearningRateSchedule(**saved)
        return
    now = dataclasses.asdict(state.schedule)
    differing = [name for name, value in now.items() if saved.get(name) != value]
    if not differing or asked.override_opt_param_scheduler:
        return
    rows = (
        f"`{_SCHEDULE_OPTIONS[name]}`: checkpoint {saved.get(name)}, this run {now[name]}"
        for name in differing
    )
    raise ConfigError(
        "the learning-rate schedule is not the checkpoint's",
        why="; ".join(rows),
        hint="give the first run's settings (`--lr-decay-iters` if only the length changed), or "
        "`--use-checkpoint-opt-param-scheduler`, or `--override-opt-param-scheduler`",
    )


def _check_order(manifest: Manifest, order: str, plan: RunPlan) -> None:
    asked = plan.config.checkpoint
    if manifest.meta["data_order"] == order or asked.override_data_order or asked.change_blend:
        return
    raise ConfigError(
        "the training samples are not in the checkpoint's order",
        why="data, weights, split, seed, sequence length or the number of epochs that the run's "
        "length needs differ; samples would be repeated or left out",
        hint="give the first run's data settings and length; or go on with new sources or weights "
        "by `--change-blend`, or in any order by `--override-data-order`",
    )
