"""The checkpoint that a run continues from: found and verified before anything is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointArgumentError, CheckpointError, ConfigError
from lmcore.base.log import ALL_RANKS
from lmcore.config.continued import SETTINGS_NAME, is_continued
from lmcore.config.option import flag_of
from lmcore.config.plan import ResumePoint
from lmcore.model.family import family_of
from lmcore.train.resume.foreign import ForeignModels, foreign_resume_point
from lmcore.train.resume.saved_run import OLDER_SETTINGS, data_rules, part_of

if TYPE_CHECKING:
    from lmcore.checkpoint.layout import Survey
    from lmcore.config.plan import RunPlan
    from lmcore.config.section import CheckpointSection
    from lmcore.config.settings import LoadedConfig
    from lmcore.conversion.loading.foreign_model import ForeignModel
    from lmcore.runtime.process.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundPoint(ResumePoint):
    """A checkpoint of lmcore that a run continues from.

    Attributes:
        survey: The checkpoints that it was chosen from.
    """

    survey: Survey


def find_resume_point(
    settings: CheckpointSection,
    *,
    continued: bool = False,
    foreign: ForeignModels | None = None,
) -> ResumePoint | None:
    """Return the checkpoint that `--load` names; None if the run starts from initial weights.

    Only the sizes of its files are compared with its manifest; see `verify_resume_point`.

    Args:
        settings: The `checkpoint` section.
        continued: True if `--continue` named the run, which then has a checkpoint.
        foreign: Checkpoints of other programs that were described already.

    Raises:
        CheckpointError: There is no checkpoint and the settings require one, or it is damaged.
    """
    if settings.load is None:
        return None
    # Only if needed: they take time.
    from lmcore.checkpoint import chosen_checkpoint, survey
    from lmcore.conversion.formats import unrecognized

    path = Path(settings.load)
    model = (foreign or ForeignModels()).describe(path, settings.ckpt_step)
    if model is not None:
        _refuse_conflicts(settings, path, model)
        _report_foreign(model, finetune=settings.finetune)
        point = foreign_resume_point(model, finetune=settings.finetune)
        return point if settings.finetune else replace(point, **_rules(point))
    if settings.ckpt_step is not None:
        if (problem := unrecognized(path)) is not None:
            raise problem
        path = chosen_checkpoint(path, settings.ckpt_step)
    try:
        found = survey(path)
        checkpoint, manifest = found.newest()
    except CheckpointError as error:
        save = settings.save
        first_start = save is not None and Path(save).resolve() == path.resolve()
        may_be_missing = first_start or not settings.exit_on_missing_checkpoint
        if continued and settings.exit_on_missing_checkpoint and not _holds_any(path):
            raise _never_saved(path) from None  # its weights may have been another model's
        if not may_be_missing or _holds_any(path):
            raise (unrecognized(path) or error) from None
        return None
    if settings.finetune:
        return FoundPoint(checkpoint, manifest, survey=found)
    point = FoundPoint(checkpoint, manifest, survey=found)
    return replace(point, **_rules(point))


def _rules(point: ResumePoint) -> dict[str, Any]:
    """Return the fields of a resume point about the data, the loss and the batch of its run."""
    manifest = point.manifest
    training = part_of(manifest.meta, "config", "config", "training")
    batch = training.get("global_batch_size")
    return {
        "data_rules": data_rules(point.checkpoint, manifest),
        "loss_rules": {
            name: training.get(name, OLDER_SETTINGS[name]) is True
            for name in ("calculate_per_token_loss", "include_padding_in_loss")
        },
        "global_batch_size": batch if type(batch) is int and batch > 0 else None,
    }


def refuse_other_family(loaded: LoadedConfig, resume: ResumePoint | None) -> None:
    """Refuse a checkpoint of another family of models, before its other settings are compared.

    Tokenizer, data and sizes of another family differ too, which would hide the cause.

    Args:
        loaded: Settings of the run, whose values are valid.
        resume: The checkpoint to load, from `find_resume_point`.

    Raises:
        CheckpointArgumentError: The families differ.
    """
    if resume is None:
        return
    family = family_of(loaded.config.model)
    saved = str(resume.manifest.model_shape.get("model_family", ""))
    now = family.key if family.matches is None else ""
    if saved == now:
        return
    flag, other = f"`{flag_of('model_family')} {saved or 'gpt'}`", "or load another checkpoint"
    continued = is_continued(loaded.provenance)
    taken = loaded.config.checkpoint.use_checkpoint_args or continued or resume.foreign
    kind, hint = loaded.provenance["model_family"].kind, f"use {flag}, {other}"
    if kind in {"flag", "file"} and (taken or not saved):
        hint = f"{loaded.removal('model_family')}, {other}"
    elif not loaded.given("model_family"):
        hint = f"add {flag}, with the options of the model, or `--use-checkpoint-args`, {other}"
    names = {"": "a decoder, GPT or Llama"}
    raise CheckpointArgumentError(
        f"`{resume.checkpoint}` is of another family of models",
        why=f"it is {names.get(saved, f'`{saved}`')}; the model of this run is "
        f"{names.get(now, f'`{now}`')}",
        hint=hint,
    )


def unknown_tokenizer(
    settings: CheckpointSection, resume: ResumePoint | None, task: str | None = None
) -> ConfigError | None:
    """Return the error for a run that is given no tokenizer and has none from its checkpoint.

    None if the checkpoint has one, or if the user accepts another one by `--change-tokenizer`.

    Args:
        settings: The `checkpoint` section.
        resume: The checkpoint to load, from `find_resume_point`.
        task: The run's `--task`; a task's texts name no tokenizer, as prepared data does.
    """
    if resume is None or settings.change_tokenizer or "tokenizer" in resume.manifest.meta:
        return None
    from lmcore.conversion.loading.checkpoint_tokenizer import no_tokenizer
    from lmcore.conversion.native.manifest import recorded_type

    path = resume.checkpoint if resume.foreign else resume.checkpoint.parent.parent
    error = no_tokenizer(path, recorded_type(resume.manifest.meta))
    if not task:
        error.hint = f"{error.hint}, or data that `lmcore data prepare` wrote with it by "
        error.hint += "`--data-path`"
    return error


def _report_foreign(model: ForeignModel, *, finetune: bool) -> None:
    """Report differences between another program's checkpoint and the model here.

    Args:
        model: The checkpoint's model.
        finetune: True if the run takes the weights alone.
    """
    from lmcore.conversion.state import TokenizerNote

    for note in (*model.notes, *(() if finetune else model.training_notes)):
        # Another warning says what becomes of the tokenizer.
        if not isinstance(note, TokenizerNote):
            logger.warning("%s: %s", model.path, note, extra=ALL_RANKS)


def _never_saved(path: Path) -> CheckpointArgumentError:
    """Return the error for a run without a checkpoint that `--continue` names."""
    hint = "start the run again"
    if (path / SETTINGS_NAME).is_file():
        hint += f": the first line of `{path / SETTINGS_NAME}` has the command"
    return CheckpointArgumentError(
        f"`--continue {path}`: the run has no checkpoint",
        why="it ended before its first one",
        hint=hint,
    )


def _refuse_conflicts(settings: CheckpointSection, path: Path, model: ForeignModel) -> None:
    """Raise a `ConfigError` for settings that contradict a `--load` of another program.

    Args:
        settings: The `checkpoint` section.
        path: Path of `--load`.
        model: Model that was found there.
    """
    if not settings.finetune and model.meta is None:
        raise ConfigError(
            f"`--no-finetune` cannot be used with `--load {path}`",
            why="it has weights alone: a run starts with them, at step 0",
            hint="leave `--no-finetune` out",
        )
    own = {path.resolve(), model.path.resolve()}
    if settings.save is not None and Path(settings.save).resolve() in own:
        raise ConfigError(
            f"`--save {settings.save}` is the directory of the model to load",
            why="the files of the run would mix with the model's",
            hint="choose a new directory with `--save`",
        )


def verify_resume_point(plan: RunPlan, rendezvous: Rendezvous | None) -> ResumePoint | None:
    """Return the newest checkpoint of `--load` whose files match their checksums.

    All processes must call it; each verifies some of the files, and all get the same checkpoint.
    Damaged checkpoints are passed over with a warning, unless `--load` names one checkpoint.

    Args:
        plan: The run; `plan.resume` is from `find_resume_point`.
        rendezvous: Connection of the processes; None in a run of one process.

    Raises:
        CheckpointError: No checkpoint matches its checksums.
        RunError: The processes see different checkpoints.
    """
    if plan.config.checkpoint.load is None:
        return None
    from lmcore.checkpoint import newest_verified
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.process.consistency import check_equal

    def agree(identity: str) -> None:
        if rendezvous is not None:
            check_equal(
                rendezvous,
                "the checkpoint that they load",
                identity,
                hint="give `--load` a directory that all hosts of the run share",
            )

    channel = Channel(rendezvous)
    if plan.resume is None:
        agree("none")
        return None
    if plan.resume.foreign:
        agree(f"`{plan.resume.checkpoint.name}`, {dict(plan.resume.manifest.model_shape)}")
        return replace(plan.resume, verified=True)
    assert isinstance(plan.resume, FoundPoint), "from `find_resume_point`"
    found = newest_verified(plan.resume.survey, channel=channel, agree=agree)
    warning = found.warning()
    if warning is not None and channel.rank == 0:
        logger.warning("%s", warning)
    return replace(
        plan.resume,
        checkpoint=found.path,
        manifest=found.manifest,
        verified=True,
        damaged=tuple(found.passed_over),
    )


def refuse_fewer_steps(plan: RunPlan) -> None:
    """Refuse a length by flag that the run has passed already.

    Args:
        plan: The run; `plan.resume` is from `find_resume_point`.

    Raises:
        ConfigError: The run has done more steps than it is to have.
    """
    resume, name = plan.resume, plan.length_option
    if resume is None or plan.config.checkpoint.finetune or plan.provenance[name].kind != "flag":
        return
    done = resume.manifest.iteration
    if plan.train_iters < done:
        unit = name.removeprefix("train_").replace("iters", "steps")
        raise ConfigError(
            f"the run has done {done:,} steps already, more than the {plan.train_iters:,} of "
            f"`{flag_of(name)} {getattr(plan.config.training, name)}`",
            why=f"the checkpoint is `{resume.checkpoint}`",
            hint=f"give the number of all {unit} of the run; `--ckpt-step N` goes back to an "
            "earlier checkpoint",
        )


def _holds_any(path: Path) -> bool:
    """Return True if a checkpoint is there, even a damaged one, which no run may ignore."""
    return path.name.startswith("iter_") or any(
        any(folder.glob("iter_*")) for folder in (path, path / "checkpoints")
    )
