"""A run's state from checkpoints, of any layout, and what must agree for a run to go on.

A run that continues is the same run or an error: the model's shape, the schedule and the order of
the data are compared with those of the checkpoint before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
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
from lmcore.errors import CheckpointError, ConfigError
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.runtime.process.consistency import check_equal
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
"""How the names of tensors end that have a row for each token."""

_NOT_IN_THE_WEIGHTS = ("init_method_std", "attention_dropout", "hidden_dropout")
"""Parts of a model's shape that a run may change when it goes on."""

_TURNING = ("rotary_base", "rope_scaling_factor")
"""What fine-tuning may change besides, where positions are rotary: a longer context wants it."""

_SCHEDULE_OPTIONS = {
    "style": "lr_decay_style",
    "highest": "lr",
    "lowest": "min_lr",
    "warmup_samples": "lr_warmup_samples",
    "decay_samples": "lr_decay_samples",
    "cooldown_fraction": "lr_cooldown_fraction",
}
"""What the user calls the numbers of a schedule."""


def restore(
    state: TrainState,
    plan: RunPlan,
    runtime: Runtime,
    *,
    order: str,
    planner: WritePlanner | None = None,
) -> Path | None:
    """Bring *state* to where the checkpoint of `--load` left it; return that checkpoint.

    All processes must call it; each reads what it holds, whatever layout the checkpoint is of.

    Args:
        state: A fresh state.
        plan: Says from where, and what of it.
        runtime: Gets the random states.
        order: `data_order` of this run's training samples.
        planner: The processes of the run; None: this is the only one.

    Raises:
        CheckpointError: None is there, or it is damaged or of another shape.
        ConfigError: The run would not be the same one.
        OtherRankError: So it is for another process.
        RunError: The processes see different checkpoints.
    """
    asked = plan.config.checkpoint
    if asked.load is None:
        return None
    resume = plan.resume
    _check_same(resume, runtime)
    if resume is None:
        logger.warning("no checkpoint in `%s`: starting from initial weights", asked.load)
        return None
    channel = (planner or WritePlanner()).loads
    checkpoint, manifest = resume.checkpoint, resume.manifest
    saved = manifest.model_shape
    now = _comparable_shape(state, saved, finetune=asked.finetune)
    rows = _differing_rows(manifest, plan)
    if rows:
        now["padded_vocab_size"] = saved["padded_vocab_size"]
    _check_model(manifest, now, plan)
    load = _Load(checkpoint, state, rows, channel)
    if rows:
        _tell_padding(manifest, plan)
        state.parallel.initialize(plan.config.training.seed)
    if asked.finetune:
        with state.weights_for_use():
            load.into(state.tensors(optimizer=False))
        return checkpoint
    check_saved_run(checkpoint, manifest)
    if asked.load_optim:
        _check_optimizer(manifest, plan)
    _adopt_schedule(state, plan, manifest)
    _check_order(manifest, order, plan)
    with state.weights_for_use():
        _load(state, plan, runtime, manifest, load)
    state.set_counters(manifest.meta["counters"])
    if asked.load_optim:
        state.loss_scale.restore(manifest.meta.get("loss_scale", {}))
    return checkpoint


def _check_same(resume: ResumePoint | None, runtime: Runtime) -> None:
    """Stop unless all processes see the same checkpoint."""
    if runtime.processes is None:
        return
    seen = "none"
    if resume is not None:
        manifest: Manifest = resume.manifest
        files = sorted((name, entry.crc32) for name, entry in manifest.files.items())
        content = zlib.crc32(json.dumps(files).encode())
        seen = f"`{resume.checkpoint.name}`, save number {manifest.sequence}, content {content:08x}"
    check_equal(
        runtime.processes.rendezvous,
        "the checkpoint that they load",
        seen,
        hint="give `--load` a directory that all hosts of the run share",
    )


@dataclass(frozen=True)
class _Load:
    """Reads from one checkpoint what a process holds."""

    checkpoint: Path
    state: TrainState
    rows: Mapping[str, int]
    channel: Channel

    def into(self, tensors: Mapping[str, Tensor], more: Mapping[str, Tensor] | None = None) -> None:
        """Fill tensors of the state, and *more*, which are whole."""
        load_checkpoint(
            self.checkpoint,
            {**tensors, **(more or {})},
            layouts=self.state.layouts(tensors),
            rows={name: count for name, count in self.rows.items() if name in tensors},
            channel=self.channel,
        )


def _load(
    state: TrainState, plan: RunPlan, runtime: Runtime, manifest: Manifest, load: _Load
) -> None:
    """Load weights, optimizer and random states, as far as *plan* asks for them."""
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
            "random numbers are drawn anew from seed and step: the checkpoint has those of %s",
            _saved_layout(manifest).words,
        )


def draws_alike(manifest: Manifest, layout: ParallelLayout) -> bool:
    """Return whether every process goes on with random numbers of the checkpoint.

    That is so where it does what the process of its rank did there; how weights and optimizer
    state are sharded does not matter.
    """
    as_saved, now = (
        dataclasses.replace(one, zero_stage=0, replicas=1)
        for one in (_saved_layout(manifest), layout)
    )
    return as_saved == now


def _saved_layout(manifest: Manifest) -> ParallelLayout:
    """Return the layout of the run that saved; without a record it divided the samples alone."""
    saved = manifest.meta.get("layout")
    if isinstance(saved, Mapping):
        known = {one.name for one in dataclasses.fields(ParallelLayout)}
        return ParallelLayout(**{name: saved[name] for name in known & saved.keys()})
    states = [name for name in manifest.tensors if name.endswith(".host")]
    return ParallelLayout(data=max(1, len(states)))


def _differing_rows(manifest: Manifest, plan: RunPlan) -> dict[str, int]:
    """Return the tensors with a row for each token, and how many rows tokens have.

    Empty where the vocabulary is padded to the same size, or is another one.
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
    """Return the model's shape with the checkpoint's values of what the run may change."""
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
    what = "those that are new begin anew" if now > int(saved or 0) else "the rest is left out"
    logger.info(
        "the vocabulary of %d tokens is padded to %d rows, in the checkpoint to %s: %s%s",
        plan.vocab_size,
        now,
        saved,
        what,
        _same_padding(manifest, plan),
    )


def _same_padding(manifest: Manifest, plan: RunPlan) -> str:
    """Return what would keep the checkpoint's padding, if anything would."""
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
        raise CheckpointError(error.what, why=error.why, hint=keeps.removeprefix("; ")) from error


def _check_optimizer(manifest: Manifest, plan: RunPlan) -> None:
    """Refuse another optimizer's state: it has other moments, or the same of another meaning."""
    settings = part_of(manifest.meta, "config", "config", "optimizer")
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
