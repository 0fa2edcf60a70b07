"""`restore`: the initial weights of a run, or its state from a checkpoint of any layout.

A run that resumes is the same run, or an error, or the difference is named: see `compare`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmcore.base.errors import CheckpointArgumentError
from lmcore.base.log import ALL_RANKS
from lmcore.checkpoint import WritePlanner, load_checkpoint
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.option import flag_of
from lmcore.conversion.native.manifest import WITHOUT_OPTIMIZER
from lmcore.conversion.state import LEFT_OUT
from lmcore.families.heads.family import HeadFamily
from lmcore.model.family import family_of, parameter_shapes, vocabulary_parameters
from lmcore.parallel.random_states import (
    random_state_name,
    random_states,
    seed_everything,
    set_random_states,
)
from lmcore.train.resume.compare import (
    check_same_run,
    comparable_shape,
    same_padding,
    warn_changed_settings,
)
from lmcore.train.resume.foreign import load_foreign
from lmcore.train.resume.saved_run import check_saved_run, part_of
from lmcore.train.resume.schedule import resumed_schedule
from lmcore.train.token_mean import may_mask_targets

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import ResumePoint, RunPlan
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

logger = logging.getLogger(__name__)


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
    resume = plan.resume
    if resume is None:
        if asked.load is not None:
            logger.warning(
                "no checkpoint in `%s`: starting from initial weights", asked.load, extra=ALL_RANKS
            )
        state.parallel.initialize(seed)
        _begin_with_pretrained(state, plan)
        return None
    channel = (planner or WritePlanner()).loads
    checkpoint, manifest = resume.checkpoint, resume.manifest
    saved = manifest.model_shape
    shape = comparable_shape(state.parallel.shape, saved, finetune=asked.finetune)
    rows = _differing_rows(manifest, plan)
    if rows:
        shape["padded_vocab_size"] = saved["padded_vocab_size"]
    if not asked.finetune:
        check_saved_run(checkpoint, manifest, own_schedule=asked.override_opt_param_scheduler)
    check_same_run(plan, checkpoint, manifest, shape, order, state.schedule)
    reader = _Reader(resume, state, rows, channel)
    new = _new_head(plan, manifest) if asked.finetune else frozenset()
    if rows:
        _tell_padding(manifest, plan)
    if rows or new:
        state.parallel.initialize(seed)
    if asked.finetune:
        with state.evaluation_weights():
            tensors = state.tensors(optimizer=False)
            reader.fill({name: tensor for name, tensor in tensors.items() if name not in new})
        logger.info("%s", _begun_with(plan, resume))
        return checkpoint
    state.schedule = resumed_schedule(plan, manifest, state.schedule)
    warn_changed_settings(plan, manifest, precision=runtime.precision.name)
    its_mean = plan.provenance["calculate_per_token_loss"].kind == "checkpoint"
    if its_mean and may_mask_targets(plan):
        logger.info("%s", _OTHER_MEAN)
    with state.evaluation_weights():
        seeded = _resume(state, plan, runtime, reader)
    logger.info("%s", _continued_with(plan, resume, seeded))
    state.set_counters(manifest.meta["counters"])
    if asked.load_optim:
        state.loss_scale.restore(manifest.meta.get("loss_scale", {}))
    return checkpoint


_OTHER_MEAN = (
    "the loss is the mean of the micro-batches' means, as in the checkpoint's run; "
    "`--calculate-per-token-loss` changes it to the mean over all valid targets"
)


@dataclass(frozen=True)
class _Reader:
    """Reader of the tensors of this rank from one checkpoint."""

    resume: ResumePoint
    state: TrainState
    rows: Mapping[str, int]
    channel: Channel

    def fill(self, tensors: Mapping[str, Tensor], more: Mapping[str, Tensor] | None = None) -> None:
        """Fill the tensors of the state, and the tensors of *more*, which are not divided."""
        if self.resume.foreign:
            layouts = self.state.layouts(tensors)
            load_foreign(self.resume.checkpoint, tensors, layouts, self.rows, self.channel)
            return
        load_checkpoint(
            self.resume.checkpoint,
            {**tensors, **(more or {})},
            self.resume.manifest,
            verify=not self.resume.verified,
            layouts=self.state.layouts(tensors),
            rows={name: count for name, count in self.rows.items() if name in tensors},
            channel=self.channel,
        )


def _begin_with_pretrained(state: TrainState, plan: RunPlan) -> None:
    """Replace initial weights by another family's, if the run names a checkpoint of it."""
    pretrained = family_of(plan.shape).pretrained
    path = plan.config.named(pretrained.option) if pretrained is not None else None
    if pretrained is None or path is None:
        return
    from lmcore.conversion.loading.weights import WeightReader

    flag, weights = f"`{flag_of(pretrained.option)}`", WeightReader(Path(path))
    shape = weights.state.shape
    if (name := family_of(shape).name) != pretrained.family or shape.task:
        head = f" with a head for the task `{shape.task}`" if shape.task else ""
        raise CheckpointArgumentError(
            f"the model of {flag} is not a {pretrained.family} from pretraining",
            why=f"`{path}` has a model of the family {name}{head}",
            hint=f"give the run or the checkpoint of a {pretrained.family}, in any format",
        )
    theirs, tokens = parameter_shapes(shape), vocabulary_parameters(plan.shape)
    for local in state.parallel.parameters:
        if not (source := pretrained.name(local.name)):
            continue
        wanted, found = tuple(local.layout.shape), theirs.get(source, ())
        padded = local.name in tokens  # the numbers of rows may differ by padding
        if not _fits(wanted, found, plan.vocab_size if padded else None):
            sizes = f"`{source}` has the shape {list(found)}" if found else f"it has no `{source}`"
            raise CheckpointArgumentError(
                f"the model of {flag} has other sizes than the run's",
                why=f"{sizes}, and `{local.name}` has the shape {list(wanted)}",
                hint=f"give the run its sizes: `lmcore checkpoint inspect {path}` shows them",
            )
        whole = weights.read(source)
        if wanted != found:
            seed = plan.config.training.seed
            rows = state.model.initial_weight(local.name, torch.Size(wanted), seed)
            rows[: plan.vocab_size] = whole[: plan.vocab_size]
            whole = rows
        local.layout.fill(local.tensor, whole)
    logger.info("%s: begins with the weights of `%s`", family_of(plan.shape).name, path)


def _fits(wanted: tuple[int, ...], found: tuple[int, ...], rows: int | None) -> bool:
    """Return True if a weight has the wanted shape, or at least the wanted number of rows."""
    if rows is None or not found:
        return wanted == found
    return wanted[1:] == found[1:] and found[0] >= rows


def _begun_with(plan: RunPlan, resume: ResumePoint) -> str:
    """Return the line about a run that takes the weights alone from a checkpoint."""
    reason = "as with `--finetune`: the checkpoint has no state of an optimizer that is read"
    if plan.provenance["finetune"].kind != "checkpoint":
        reason = "because of `--finetune`"
    return (
        f"taken from `{resume.checkpoint}`: weights; not taken: optimizer state, step, samples, "
        f"random states ({reason}): the run begins at step 0"
    )


def _continued_with(plan: RunPlan, resume: ResumePoint, seeded: str) -> str:
    """Return the line about a run that continues: what it has of the checkpoint, and what not.

    Args:
        plan: The run.
        resume: The checkpoint.
        seeded: Reason for which the random states are not the checkpoint's; empty if they are.
    """
    asked, counters = plan.config.checkpoint, resume.manifest.meta["counters"]
    samples = counters["consumed_samples"]
    parts = {"optimizer state": "" if asked.load_optim else "`--no-load-optim`"}
    parts["random states"] = seeded
    taken = ["weights", *(name for name, reason in parts.items() if not reason)]
    taken += [f"step {resume.manifest.iteration:,}", f"{samples:,} samples"]
    left = ", ".join(f"{name} ({reason})" for name, reason in parts.items() if reason)
    line = f"taken from `{resume.checkpoint}`: {', '.join(taken)}"
    return f"{line}; not taken: {left}" if left else line


def _resume(state: TrainState, plan: RunPlan, runtime: Runtime, reader: _Reader) -> str:
    """Load weights, and the optimizer and random states that *plan* requests.

    Returns:
        The reason for which random states are not the checkpoint's; empty if they are.
    """
    asked, manifest = plan.config.checkpoint, reader.resume.manifest
    tensors = state.tensors(optimizer=asked.load_optim)
    states: dict[str, Tensor] = {}
    converted = "converted_from" in manifest.meta  # without random states
    if asked.load_rng and not converted and draws_alike(manifest, plan.layout):
        states = random_states(runtime)
    named = {random_state_name(name, runtime.rank.rank): state for name, state in states.items()}
    _check_presence(manifest, tensors, named)
    reader.fill(tensors, named)
    if states:
        set_random_states(states, runtime)
        return ""
    if not asked.load_rng:
        return "`--no-load-rng`"
    seed_everything(plan.config.training.seed, runtime, plan.layout, step=manifest.iteration)
    model = plan.config.model
    reason = "the checkpoint's layout is {}, this run's {}".format(
        *(_saved_layout(manifest).words, plan.layout.words)
    )
    if converted:
        of = "is of another program" if reader.resume.foreign else "was converted"
        reason = f"the checkpoint {of}"
    logger.log(
        logging.WARNING if model.attention_dropout or model.hidden_dropout else logging.INFO,
        "random states are seeded from seed and step: %s",
        reason,
    )
    return f"seeded from seed and step: {reason}"


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

    Empty if the padded sizes are equal, or if the vocabularies differ.  Another program's model may
    have more rows than its tokenizer has tokens, which are a part of the run's vocabulary; or its
    number of tokens is not known.
    """
    derived = part_of(manifest.meta, "config", "derived")
    saved = manifest.model_shape.get("padded_vocab_size")
    sizes: set[int | None] = {plan.vocab_size}
    if plan.resume is not None and plan.resume.foreign:
        sizes |= {plan.tokenizer.vocab_size, None}
    if saved == plan.padded_vocab_size or derived.get("vocab_size") not in sizes:
        return {}
    suffixes = tuple(f".{name}" for name in vocabulary_parameters(plan.shape))
    return {name: plan.vocab_size for name in manifest.tensors if name.endswith(suffixes)}


def _new_head(plan: RunPlan, manifest: Manifest) -> frozenset[str]:
    """Return the tensors of a head for a task that get initial values, and log what is not loaded.

    All of the head is loaded that the checkpoint has; its outputs only if their classes are equal.
    """
    family = family_of(plan.shape)
    if not isinstance(family, HeadFamily):
        return frozenset()
    saved_task = part_of(manifest.meta, "config", "config", "task")
    labels = list(saved_task.get("task_labels") or ())
    same = manifest.model_shape.get("task") == family.task
    same = same and labels == list(plan.config.task.task_labels)
    wanted = [f"model.{name}" for name in parameter_shapes(plan.shape)]
    new = [
        name
        for name in wanted
        if family.is_of_head(short := name.removeprefix("model."))
        and (name not in manifest.tensors or (short.startswith("classifier.") and not same))
    ]
    if new:
        names = _modules(new)
        logger.info("%s of the head for %s: new, with initial values", names, family.task)
    weights = {name for name in manifest.tensors if name.startswith("model.")}
    if left := weights - set(wanted):
        logger.info("%s of the checkpoint: left out, as the head replaces it", _modules(left))
    return frozenset(new)


def _modules(tensors: Collection[str]) -> str:
    """Return the modules of some tensors of a model, for a message."""
    return ", ".join(f"`{name}`" for name in sorted({name.split(".")[1] for name in tensors}))


def _tell_padding(manifest: Manifest, plan: RunPlan) -> None:
    """Log the changed padding of the vocabulary, as a warning if losses include its rows."""
    saved, now = manifest.model_shape["padded_vocab_size"], plan.padded_vocab_size
    what = "new rows get initial values" if now > int(saved or 0) else "the other rows are dropped"
    training = plan.config.training
    warns = training.include_padding_in_loss and not plan.config.checkpoint.finetune
    keeps = same_padding(manifest, plan)
    losses = "; losses do not include them"
    if training.include_padding_in_loss:
        losses = ", and losses change, as the softmax includes all rows"
        losses += f"; {keeps}" if keeps else ""
    logger.log(
        logging.WARNING if warns else logging.INFO,
        "the vocabulary of %d tokens is padded to %d rows, in the checkpoint to %s: %s%s",
        plan.vocab_size,
        now,
        saved,
        what,
        losses,
        extra=ALL_RANKS,
    )


def _check_presence(
    manifest: Manifest, tensors: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    lacking = [
        name for name in tensors if name.startswith("optimizer.") and name not in manifest.tensors
    ]
    if lacking and any(name.startswith("optimizer.") for name in manifest.tensors):
        raise CheckpointArgumentError(
            "the optimizer's state in the checkpoint has other tensors than this run's",
            why=f"it lacks `{lacking[0]}`: settings of the optimizer differ",
            hint="give the first run's, or add `--no-load-optim` to continue with a new optimizer",
        )
    if lacking:
        raise _without_optimizer(manifest)
    if any(name not in manifest.tensors for name in states):
        raise CheckpointArgumentError(
            "the checkpoint has no random states for this device",
            why="it was saved with `--no-save-rng`, on another device, or left out by an edit",
            hint="add `--no-load-rng` to continue with new ones",
        )


def _without_optimizer(manifest: Manifest) -> CheckpointArgumentError:
    """Return the error for a checkpoint without the state of an optimizer; it names the cause."""
    hint = "add `--no-load-optim` to continue with a new optimizer"
    converted = part_of(manifest.meta, "converted_from")
    reason = converted.get(WITHOUT_OPTIMIZER)
    if isinstance(reason, str):
        why = f"it was converted from {converted.get('format')}, `{converted.get('name')}`, "
        if reason == LEFT_OUT:
            why += "by `--weights-only`"
            hint += ", or convert it again without `--weights-only`"
        else:
            why += f"whose state is not read: {reason}" if reason else "which has none"
    else:
        why = "it was saved with `--no-save-optim`, or left out by `lmcore checkpoint edit` or "
        why += "`convert`"
    return CheckpointArgumentError("the checkpoint has no optimizer state", why=why, hint=hint)
