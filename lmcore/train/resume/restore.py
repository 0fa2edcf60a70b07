"""`restore`: the initial weights of a run, or its state from a checkpoint of any layout.

A run that resumes is the same run or an error: the model's shape, the schedule and the order of the
data are compared with the checkpoint's before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint import (
    WritePlanner,
    check_shape,
    load_checkpoint,
)
from lmcore.config.layout import ParallelLayout
from lmcore.errors import CheckpointArgumentError, CheckpointError, ConfigError
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.resume.saved_meta import check_saved_run, part_of
from lmcore.train.state import (
    random_state_name,
    random_states,
    seed_everything,
    set_random_states,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import ResumePoint, RunPlan
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["draws_alike", "restore"]

logger = logging.getLogger(__name__)

_ROW_FOR_EACH_TOKEN = (".token_embedding.weight", ".output_embedding.weight")
"""Suffixes of the names of tensors with a row for each token."""

_NOT_IN_THE_WEIGHTS = ("init_method_std", "attention_dropout", "hidden_dropout")
"""Fields of a model's shape that a resumed run may change."""

_TURNING = ("rotary_base", "rope_scaling_factor")
"""Fields of a rotary model that fine-tuning may change, too: a longer context needs it."""

_SCHEDULE_OPTIONS = {
    "style": "lr_decay_style",
    "highest": "lr",
    "lowest": "min_lr",
    "warmup_samples": "lr_warmup_samples",
    "decay_samples": "lr_decay_samples",
    "cooldown_fraction": "lr_cooldown_fraction",
}
"""Option names of the fields of a learning-rate schedule."""


def restore(
    state: TrainState,
    plan: RunPlan,
    runtime: Runtime,
    *,
    order: str,
    planner: WritePlanner | None = None,
) -> Path | None:
    """Load *state* from the checkpoint of `--load` and return it; without one, draw the weights.

    All processes must call it; each reads the parts that it holds, whatever the layout of the
    checkpoint is.

    Args:
        state: State without initial weights.
        plan: The run; `plan.resume` is the checkpoint.
        runtime: Device, whose random states are set, and processes.
        order: Fingerprint of the order of this run's training samples.
        planner: Write planner of the run, with its channels; None in a run of one process.

    Raises:
        CheckpointError: The checkpoint is damaged, or its model has another shape.
        ConfigError: The run would not be the checkpoint's run.
        OtherRankError: Another rank cannot load its part.
    """
    asked = plan.config.checkpoint
    seed = plan.config.training.seed
    if asked.load is None:
        state.parallel.initialize(seed)
        return None
    resume = plan.resume
    if resume is None:
        logger.warning("no checkpoint in `%s`: starting from initial weights", asked.load)
        state.parallel.initialize(seed)
        return None
    channel = (planner or WritePlanner()).loads
    checkpoint, manifest = resume.checkpoint, resume.manifest
    saved = manifest.model_shape
    now = _comparable_shape(state, saved, finetune=asked.finetune)
    rows = _differing_rows(manifest, plan)
    if rows:
        now["padded_vocab_size"] = saved["padded_vocab_size"]
    _check_model(manifest, now, plan)
    load = _Load(resume, state, rows, channel)
    if rows:
        _tell_padding(manifest, plan)
        state.parallel.initialize(seed)
    if asked.finetune:
        with state.evaluation_weights():
            load.into(state.tensors(optimizer=False))
        return checkpoint
    check_saved_run(checkpoint, manifest)
    if asked.load_optim:
        _check_optimizer(manifest, plan)
    _adopt_schedule(state, plan, manifest)
    _check_order(manifest, order, plan)
    with state.evaluation_weights():
        _load(state, plan, runtime, manifest, load)
    state.set_counters(manifest.meta["counters"])
    if asked.load_optim:
        state.loss_scale.restore(manifest.meta.get("loss_scale", {}))
    return checkpoint


@dataclass(frozen=True)
class _Load:
    """Reads the tensors of this rank from one checkpoint."""

    resume: ResumePoint
    state: TrainState
    rows: Mapping[str, int]
    channel: Channel

    def into(self, tensors: Mapping[str, Tensor], more: Mapping[str, Tensor] | None = None) -> None:
        """Fill the tensors of the state, and the tensors of *more*, which are not divided."""
        load_checkpoint(
            self.resume.checkpoint,
            {**tensors, **(more or {})},
            self.resume.manifest,
            verify=not self.resume.verified,
            layouts=self.state.layouts(tensors),
            rows={name: count for name, count in self.rows.items() if name in tensors},
            channel=self.channel,
        )


def _load(
    state: TrainState, plan: RunPlan, runtime: Runtime, manifest: Manifest, load: _Load
) -> None:
    """Load weights, and the optimizer and random states that *plan* asks for."""
    asked = plan.config.checkpoint
    tensors = state.tensors(optimizer=asked.load_optim)
    states: dict[str, Tensor] = {}
    if asked.load_rng and draws_alike(manifest, plan.layout):
        states = random_states(runtime)
    named = {random_state_name(name, runtime.rank.rank): state for name, state in states.items()}
    _check_presence(manifest, tensors, named)
    load.into(tensors, named)
    if states:
        set_random_states(states, runtime)
    elif asked.load_rng:
        seed_everything(plan.config.training.seed, runtime, plan.layout, step=manifest.iteration)
        logger.info(
            "random states are seeded from seed and step: the checkpoint's layout is %s",
            _saved_layout(manifest).words,
        )


def draws_alike(manifest: Manifest, layout: ParallelLayout) -> bool:
    """Return True if every rank continues with the random states of the checkpoint.

    Each rank must have the role that the same rank had in the saved run; the sharding of weights
    and optimizer state does not matter.
    """
    as_saved, now = (
        dataclasses.replace(each, zero_stage=0, replicas=1)
        for each in (_saved_layout(manifest), layout)
    )
    return as_saved == now


def _saved_layout(manifest: Manifest) -> ParallelLayout:
    """Return the layout of the saved run; without a record it is data-parallel."""
    saved = manifest.meta.get("layout")
    if isinstance(saved, Mapping):
        known = {field.name for field in dataclasses.fields(ParallelLayout)}
        return ParallelLayout(**{name: saved[name] for name in known & saved.keys()})
    states = [name for name in manifest.tensors if name.endswith(".host")]
    return ParallelLayout(data=max(1, len(states)))


def _differing_rows(manifest: Manifest, plan: RunPlan) -> dict[str, int]:
    """Return the number of token rows of each tensor whose vocabulary padding differs.

    Empty if the padded sizes are equal, or if the vocabularies differ.
    """
    derived = part_of(manifest.meta, "config", "derived")
    saved = manifest.model_shape.get("padded_vocab_size")
    if saved == plan.padded_vocab_size or derived.get("vocab_size") != plan.vocab_size:
        return {}
    return {
        name: plan.vocab_size for name in manifest.tensors if name.endswith(_ROW_FOR_EACH_TOKEN)
    }


def _comparable_shape(
    state: TrainState, saved: Mapping[str, Any], *, finetune: bool
) -> dict[str, Any]:
    """Return the model's shape, with the checkpoint's values of fields that the run may change."""
    shape = state.parallel.shape
    now, free = shape.to_dict(), list(_NOT_IN_THE_WEIGHTS)
    if not shape.learned_positions:
        free.append("max_position_embeddings")
    now |= {name: getattr(shape, name) for name in saved if name in shape.later()}
    now |= {name: saved[name] for name in free if name in saved}
    if finetune and shape.rotary:
        turning = {name: saved[name] for name in _TURNING if name in saved}
        now = {name: value for name, value in now.items() if name not in _TURNING} | turning
    return now


def _tell_padding(manifest: Manifest, plan: RunPlan) -> None:
    saved, now = manifest.model_shape["padded_vocab_size"], plan.padded_vocab_size
    what = "new rows get initial values" if now > int(saved or 0) else "the other rows are dropped"
    logger.info(
        "the vocabulary of %d tokens is padded to %d rows, in the checkpoint to %s: %s%s",
        plan.vocab_size,
        now,
        saved,
        what,
        _same_padding(manifest, plan),
    )


def _same_padding(manifest: Manifest, plan: RunPlan) -> str:
    """Return the flag that keeps the checkpoint's padding; empty if there is none."""
    saved, tensor = manifest.model_shape.get("padded_vocab_size"), plan.layout.tensor
    if not isinstance(saved, int) or saved < plan.vocab_size or saved % tensor:
        return ""
    return f"; `--make-vocab-size-divisible-by {saved // tensor}` keeps the checkpoint's"


def _check_model(manifest: Manifest, shape: Mapping[str, Any], plan: RunPlan) -> None:
    try:
        check_shape(manifest, shape)
    except CheckpointError as error:
        same = dict(manifest.model_shape) | {"padded_vocab_size": shape["padded_vocab_size"]}
        keeps = _same_padding(manifest, plan)
        if same != shape or not keeps:
            raise
        hint = keeps.removeprefix("; ")
        raise CheckpointArgumentError(error.what, why=error.why, hint=hint) from error


def _check_optimizer(manifest: Manifest, plan: RunPlan) -> None:
    """Refuse the state of another optimizer, whose moments have another meaning."""
    settings = part_of(manifest.meta, "config", "config", "optimizer")
    saved, now = settings.get("optimizer"), plan.config.optimizer.optimizer
    if saved in {None, now}:
        return
    raise ConfigError(
        f"the checkpoint was written with `--optimizer {saved}`, this run uses `{now}`",
        why="one optimizer cannot use the state of another",
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
