"""Comparison of a run with the run that wrote its checkpoint, before any tensor is read.

A difference is allowed, logged as a warning, or an error: each option declares by `on_resume` which
of these applies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, ConfigError, LmcoreError
from lmcore.base.log import ALL_RANKS
from lmcore.checkpoint import check_shape
from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.config.continued import continue_command, is_continued
from lmcore.config.derived.data_source import BUNDLED
from lmcore.config.option import DROPOUT, flag_of
from lmcore.config.tokenizer import TokenizerIdentity, TokenizerSettings
from lmcore.conversion.native.manifest import UNKNOWN_ORDER, recorded_type
from lmcore.data.tokenizer import tokenizer_from
from lmcore.data.tokenizer.comparison import may_be_same, same_tokens, token_difference
from lmcore.data.tokenizer.saved import saved_tokenizer_settings
from lmcore.families.heads.family import CHOICE
from lmcore.model.family import family_of
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.resume.saved_run import part_of, setting_pair
from lmcore.train.resume.schedule import schedule_problem

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

logger = logging.getLogger(__name__)

_NOT_IN_THE_WEIGHTS = ("init_method_std", "attention_dropout", "hidden_dropout")
"""Fields of a model's shape that a resumed run may change."""

_ROTARY = ("rotary_base", "rope_scaling_factor")
"""Fields of a rotary model that fine-tuning may change, too: a longer context needs it."""

_TASK = ("task", "num_labels")
"""Fields of a model with a head for a task, which fine-tuning may put on other weights."""

_ORDER_OF_A_SOURCE = ("seed", "seq_length", "split", "final_epoch_threshold", "dataloader_type")
"""Options that change the order of each source's samples, which `--change-blend` keeps."""


@dataclass(frozen=True)
class _Difference:
    """One difference from the checkpoint's run that stops a resume.

    Attributes:
        problem: The error, complete if it is the only one.
        flag: Flag that accepts the difference; empty if none does.
    """

    problem: LmcoreError
    flag: str = ""


def check_same_run(
    plan: RunPlan,
    checkpoint: Path,
    manifest: Manifest,
    shape: Mapping[str, Any],
    order: str,
    schedule: LearningRateSchedule,
) -> None:
    """Refuse to resume from, or to fine-tune, a checkpoint that does not fit the run.

    Args:
        plan: The run.
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint; for a run that resumes, checked by `check_saved_run`.
        shape: Shape of the run's model, from `comparable_shape`.
        order: Fingerprint of the order of the run's training samples.
        schedule: Learning-rate schedule of the run's own settings.

    Raises:
        CheckpointError: The checkpoint is of another model, and nothing else differs.
        ConfigError: All differences at once, with the command that accepts them.
    """
    asked = plan.config.checkpoint
    problem = tokenizer_problem(plan, checkpoint, manifest)
    # No command accepts another tokenizer together with other differences.
    found = [None if problem is None else _Difference(problem)]
    found.append(_model_difference(plan, manifest, shape, same_tokenizer=problem is None))
    saved, now = part_of(manifest.meta, "tokenizer").get("fingerprint"), plan.tokenizer.fingerprint
    if saved is None and now:
        report_unknown_tokenizer(plan, manifest)
    if not asked.finetune:
        if asked.load_optim:
            found.append(_optimizer_difference(plan, manifest))
        problem = schedule_problem(plan, manifest, schedule)
        found.append(None if problem is None else _Difference(problem, "--schedule extend"))
        found.append(_order_difference(plan, manifest, order))
        found.append(_batch_difference(plan, manifest))
    differences = [difference for difference in found if difference is not None]
    if len(differences) == 1:
        raise differences[0].problem
    if differences:
        raise _together(plan, checkpoint, differences)


def _together(plan: RunPlan, checkpoint: Path, differences: list[_Difference]) -> ConfigError:
    """Return one error for several differences, with one command as the hint."""
    flags = [difference.flag for difference in differences if difference.flag]
    problems = [ConfigError(each.problem.what, why=each.problem.why) for each in differences]
    hint = f"to accept the differences, add `{' '.join(flags)}`" if flags else ""
    run = checkpoint.parent.parent
    if plan.resume is not None and plan.resume.foreign:
        hint = "leave out the options of model and tokenizer: both are the checkpoint's"
    elif len(flags) < len(differences) and plan.config.checkpoint.finetune:
        hint = "`--use-checkpoint-args` takes model and tokenizer from the checkpoint"
    elif len(flags) < len(differences) and (run / "config.yaml").is_file():
        length, name = "", plan.length_option
        if plan.provenance[name].kind == "flag":
            length = f" {flag_of(name)} {getattr(plan.config.training, name)}"
        given = [flag for flag in flags if flag.startswith("--schedule")]
        if plan.provenance["schedule"].kind == "flag":
            given = [f"--schedule {plan.config.checkpoint.schedule}"]
        command = " ".join([continue_command(run) + length, *given])
        hint = f"take the settings of that run: `{command}`"
    problems[-1].hint = hint or differences[-1].problem.hint
    return ConfigError.collect(problems)


def comparable_shape(
    shape: ModelShape, saved: Mapping[str, Any], *, finetune: bool
) -> dict[str, Any]:
    """Return the model's shape, with the checkpoint's values of fields that the run may change.

    Args:
        shape: Shape of the run's model.
        saved: Shape in the manifest.
        finetune: True if the run takes weights only.
    """
    now = shape.to_dict()
    free = [*_NOT_IN_THE_WEIGHTS, *family_of(shape).not_in_the_weights]
    if not shape.learned_positions:
        free.append("max_position_embeddings")
    if shape.task == CHOICE:
        free.append(
            "num_labels"
        )  # the most choices, also of a validation; no weight has their size
    now |= {name: value for name, value in shape.values().items() if name in saved}
    now |= {name: saved[name] for name in free if name in saved}
    if finetune and shape.rotary:
        rotary = {name: saved[name] for name in _ROTARY if name in saved}
        now = {name: value for name, value in now.items() if name not in _ROTARY} | rotary
    if finetune and shape.task:
        task = {name: saved[name] for name in _TASK if name in saved}
        now = {name: value for name, value in now.items() if name not in _TASK} | task
    return now


def same_padding(manifest: Manifest, plan: RunPlan) -> str:
    """Return the flag that keeps the checkpoint's vocabulary padding; empty if there is none."""
    saved, tensor = manifest.model_shape.get("padded_vocab_size"), plan.layout.tensor
    if not isinstance(saved, int) or saved < plan.vocab_size or saved % tensor:
        return ""
    return f"`--make-vocab-size-divisible-by {saved // tensor}` keeps the checkpoint's"


def _model_difference(
    plan: RunPlan, manifest: Manifest, shape: Mapping[str, Any], *, same_tokenizer: bool
) -> _Difference | None:
    try:
        check_shape(manifest, shape)
    except CheckpointError as error:
        same = dict(manifest.model_shape) | {"padded_vocab_size": shape["padded_vocab_size"]}
        keeps = same_padding(manifest, plan)
        if same_tokenizer and same == shape and keeps:
            error.hint = keeps
        elif plan.resume is not None and plan.resume.foreign:
            error.what = f"`{plan.resume.checkpoint}` has another model than this run"
            error.hint = "leave out the options of the model: its shape is the checkpoint's"
        elif is_continued(plan.provenance):
            error.hint = "leave out the settings that change the model of the run"
        elif shape.get("task") and not manifest.model_shape.get("task"):
            error.hint = (
                "add `--finetune`: the run begins with the weights of the layers, and a new head"
            )
        else:
            error.hint = (
                "give the model options that the checkpoint was trained with, as "
                "`--use-checkpoint-args` does for those that are not given; or load another one"
            )
        return _Difference(error)
    return None


def _optimizer_difference(plan: RunPlan, manifest: Manifest) -> _Difference | None:
    """Return the difference of the optimizers, whose moments have different meanings."""
    settings = part_of(manifest.meta, "config", "config", "optimizer")
    saved, now = settings.get("optimizer"), plan.config.optimizer.optimizer
    if saved in {None, now}:
        return None
    problem = ConfigError(
        f"the checkpoint was written with `--optimizer {saved}`, this run uses `{now}`",
        why="one optimizer cannot use the state of another",
        hint=f"use `--optimizer {saved}`, or `--no-load-optim` to continue with a new `{now}`",
    )
    return _Difference(problem, "--no-load-optim")


def _order_difference(plan: RunPlan, manifest: Manifest, order: str) -> _Difference | None:
    asked = plan.config.checkpoint
    if manifest.meta["data_order"] == order or asked.override_data_order or asked.change_blend:
        return None
    if manifest.meta["data_order"] == UNKNOWN_ORDER:
        if plan.sources.bundled:
            return _Difference(
                ConfigError(
                    "the data of the run is not known",
                    why="the checkpoint was converted, and does not name it; without a flag a run "
                    "trains on the bundled text",
                    hint="name the data by `--data-path`; the bundled text, by "
                    f"`--corpus {BUNDLED}`",
                ),
                f"--corpus {BUNDLED}",
            )
        logger.warning(
            "the checkpoint does not record the order of its training samples: the run continues "
            "at sample %d of its own order",
            manifest.meta["counters"]["consumed_samples"],
            extra=ALL_RANKS,
        )
        return None
    recorded = manifest.meta.get("data") is not None
    rules = plan.resume.data_rules if plan.resume is not None else {}
    differing = [
        f"`{flag_of(name)}` is {rule} in the checkpoint, {now} in this run"
        for name, rule in rules.items()
        if (now := getattr(plan.config.data, name)) != rule
    ]
    config = part_of(manifest.meta, "config", "config")
    for option in (plan.options[name] for name in _ORDER_OF_A_SOURCE):
        saved, now = part_of(config, option.section).get(option.key), plan.value(option)
        if saved is not None and saved != now:
            recorded = False  # `--change-blend` would refuse it
            differing.append(f"`{option.flag}` is {saved} in the checkpoint, {now} in this run")
    any_order = "`--override-data-order` continues in this run's order"
    problem = ConfigError(
        "this run would see the samples in another order than the checkpoint's",
        why="; ".join(differing)
        or "data, weights, split, seed, sequence length or the number of epochs that the run's "
        "length needs differ; samples would be repeated or left out",
        hint="give the first run's data settings and length; or continue with new sources or "
        "weights by `--change-blend`, or in any order by `--override-data-order`"
        if recorded
        else f"give the first run's data settings; {any_order}",
    )
    return _Difference(problem, "--change-blend" if recorded else "--override-data-order")


def _batch_difference(plan: RunPlan, manifest: Manifest) -> _Difference | None:
    """Return the difference of the batch sizes if the steps left do not fit the samples left."""
    counters, sizes = manifest.meta["counters"], plan.batch_sizes
    consumed, left = counters["consumed_samples"], plan.train_iters - counters["iteration"]
    end = consumed + sizes.samples(max(left, 0), consumed)
    by_samples = plan.config.training.train_samples is not None
    unused = by_samples and plan.train_samples - end >= sizes.at(end)
    if end <= max(plan.train_samples, consumed) and not unused:
        return None
    settings = part_of(manifest.meta, "config", "config", "training")
    ramp = " ".join(map(str, settings.get("rampup_batch_size") or ("none",)))
    batch, steps = settings.get("global_batch_size"), counters["iteration"]
    hint = f"give the first run's `--global-batch-size {batch} --rampup-batch-size {ramp}`"
    if schedule := settings.get("step_batch_size_schedule"):
        hint = f"give the first run's `--step-batch-size-schedule {' '.join(map(str, schedule))}`"
    if batch is None:  # of another program, whose files do not have it
        hint = "give the first run's `--global-batch-size`, which the checkpoint does not record"
        if steps and consumed % steps == 0:
            hint += f"; its steps had {consumed // steps:,} samples if all had as many"
    problem = ConfigError(
        "the batch sizes are not the checkpoint's",
        why=f"the checkpoint's {counters['iteration']:,} steps consumed {consumed:,} of "
        f"{plan.train_samples:,} samples; with this run's batch sizes the other "
        f"{max(left, 0):,} steps would end at {end:,}",
        hint=hint,
    )
    return _Difference(problem)


def warn_changed_settings(plan: RunPlan, manifest: Manifest, *, precision: str) -> None:
    """Log one warning that names every setting whose change is neither free nor checked.

    Args:
        plan: The run that resumes.
        manifest: Manifest of the checkpoint.
        precision: Name of the precision policy in force.
    """
    rows = changed_settings(plan, manifest, precision=precision)
    if rows:
        listed = "; ".join(rows)
        if plan.config.checkpoint.use_checkpoint_args:
            listed += (
                " (`--use-checkpoint-args` takes model, tokenizer and precision; `--continue` in "
                "the place of `--load` takes all settings)"
            )
        logger.warning("settings differ from the checkpoint's: %s", listed, extra=ALL_RANKS)


def changed_settings(plan: RunPlan, manifest: Manifest, *, precision: str) -> list[str]:
    """Return a description of each changed setting that `warn_changed_settings` names."""
    config = part_of(manifest.meta, "config", "config")
    model, found = plan.config.model, []
    named = {"warn", DROPOUT} if model.attention_dropout or model.hidden_dropout else {"warn"}
    for option in plan.options.values() if config else ():
        if option.on_resume not in named:
            continue
        recorded = option.key in part_of(config, option.section) or option.name == "precision"
        if "converted_from" in manifest.meta and not recorded:
            continue  # another program's value is not known
        saved, now = setting_pair(plan, option, config)
        if option.name == "precision":
            saved, now = manifest.meta.get("precision", saved), precision
            if saved is None:  # lmcore 2026.11 did not record the default that it chose
                continue
        if saved != now:
            found.append(f"`{option.name}` {_shown(saved)} -> {_shown(now)}")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def report_unknown_tokenizer(plan: RunPlan, manifest: Manifest) -> None:
    """Log that the run's tokenizer is not compared with the checkpoint's, which lacks its files.

    Args:
        plan: The run.
        manifest: Manifest of the checkpoint.
    """
    recorded, now = recorded_type(manifest.meta), plan.tokenizer.type
    tokens = part_of(manifest.meta, "config", "derived").get("vocab_size")
    own = plan.tokenizer.vocab_size
    if isinstance(tokens, int) and own < tokens:
        logger.warning(
            "this run's tokenizer, `%s`, has %d tokens, and the checkpoint %d: is it the one that "
            "the model was trained with?",
            *(now, own, tokens),
            extra=ALL_RANKS,
        )
    if recorded is None:
        logger.warning(
            "the checkpoint does not record its tokenizer: it is not compared with this run's `%s`",
            now,
            extra=ALL_RANKS,
        )
        return
    logger.log(
        logging.INFO if recorded == now else logging.WARNING,
        "the checkpoint has only the name of its tokenizer, `%s`: its tokens are not compared with "
        "this run's `%s`",
        recorded,
        now,
        extra=ALL_RANKS,
    )


def tokenizer_problem(plan: RunPlan, checkpoint: Path, manifest: Manifest) -> ConfigError | None:
    """Return the difference of the tokenizers; None if they are equal or it is accepted.

    Args:
        plan: The run.
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
    """
    saved = part_of(manifest.meta, "tokenizer")
    fingerprint, now = saved.get("fingerprint"), plan.tokenizer
    if plan.config.checkpoint.change_tokenizer or not now.fingerprint:
        return None
    if fingerprint is None:
        return _type_problem(plan, manifest)
    if fingerprint == now.fingerprint:
        return None
    both = _both_tokenizers(saved, checkpoint, now)
    if both is not None and same_tokens(*both):
        return None
    difference = both and token_difference(*both, ("the checkpoint's", "this run's"))
    kind = part_of(saved, "describe").get("type", "unknown")
    return ConfigError(
        "the tokenizer is not the checkpoint's",
        why=f"checkpoint: `{kind}`; this run: `{now.type}`, "
        f"{'of other files' if kind == now.type else 'whose token ids have other meanings'}"
        + (f": {difference}" if difference else ""),
        hint=f"{_tokenizer_hint(saved, checkpoint)}; `--change-tokenizer` accepts the difference",
    )


def _type_problem(plan: RunPlan, manifest: Manifest) -> ConfigError | None:
    """Return the difference from a tokenizer if the checkpoint has only the name of its type."""
    recorded, now = recorded_type(manifest.meta), plan.tokenizer.type
    if recorded is None or may_be_same(recorded, now):
        return None
    return ConfigError(
        "the tokenizer is not the checkpoint's",
        why=f"checkpoint: `{recorded}`; this run: `{now}`, whose token ids have other meanings",
        hint=f"use the checkpoint's, `--tokenizer-type {recorded}` with its files, and data "
        "prepared with it; `--change-tokenizer` accepts the difference",
    )


def _both_tokenizers(
    saved: Mapping[str, Any], checkpoint: Path, now: TokenizerIdentity
) -> tuple[Tokenizer, Tokenizer] | None:
    """Return the tokenizers of a checkpoint and of the run; None if one cannot be built.

    Args:
        saved: Record of the tokenizer in the manifest.
        checkpoint: Directory of the checkpoint.
        now: Tokenizer of the run.
    """
    settings = _saved_tokenizer(saved, checkpoint)
    try:
        if settings is None:
            return None
        before = tokenizer_from(settings)
        if before.fingerprint() != saved.get("fingerprint"):
            return None
        return before, tokenizer_from(TokenizerSettings.described(now.description))
    except LmcoreError:  # files are gone, or the type is a plugin's
        return None


def _saved_tokenizer(saved: Mapping[str, Any], checkpoint: Path) -> TokenizerSettings | None:
    """Return settings that build a checkpoint's tokenizer; None without any.

    The copy in the run directory comes first, then the recorded settings: another program's
    checkpoint is in no run directory.
    """
    try:
        if checkpoint.parent.name == CHECKPOINTS_NAME:
            copy = saved_tokenizer_settings(checkpoint.parent.parent / "tokenizer")
            if copy is not None:
                return copy
        described = TokenizerSettings.described(part_of(saved, "describe"))
    except LmcoreError:
        return None
    return described if described.tokenizer_type is not None else None


def _tokenizer_hint(saved: Mapping[str, Any], checkpoint: Path) -> str:
    """Return how to use the tokenizer of a checkpoint, by the copy in its run's directory."""
    settings = _saved_tokenizer(saved, checkpoint)
    if settings is None:
        return "use data prepared with the checkpoint's tokenizer"
    given = " ".join([f"--tokenizer-type {settings.tokenizer_type}", *settings.given().values()])
    return f"use the checkpoint's, `{given}`, and data prepared with it"
