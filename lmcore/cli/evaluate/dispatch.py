"""Choice between an evaluation without training, a fine-tuning, a head's and an index's scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, LmcoreError, suggestion
from lmcore.cli.evaluate.finetune_section import ONLY_FINETUNE
from lmcore.cli.evaluate.retrieval import NQ, evaluate_retrieval
from lmcore.cli.loading import require_checkpoint
from lmcore.config.option import flag_of, options_of

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.finetune.record import TunedTask
    from lmcore.evaluation.task import Task
    from lmcore.plugin import PluginSet

__all__ = ["evaluate_head", "split_training"]


def split_training(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the command, and the arguments of `lmcore train`.

    Args:
        argv: All arguments; with `--finetune`, the arguments of training follow after `--`.
    """
    if "--" not in argv or "--finetune" not in argv[: argv.index("--")]:
        return list(argv), []
    place = argv.index("--")
    return list(argv[:place]), list(argv[place + 1 :])


def evaluate_head(
    section: EvaluateSection,
    training: Sequence[str],
    plugins: PluginSet,
    settings: PluginSettings,
    known: Sequence[Task],
    argv: Sequence[str],
) -> int | None:
    """Train and score a head, score a trained one, or an index; return the exit status.

    None: the command asks for none of these.

    Args:
        section: Options of the command.
        training: Arguments of `lmcore train`.
        plugins: Plugins to choose from.
        settings: Options of the plugins.
        known: Tasks that need no training.
        argv: Arguments of the command, for further processes of it.

    Raises:
        ConfigError: The options contradict each other, or the checkpoint.
    """
    from lmcore.evaluation.finetune import TUNED

    own = {task.name: task for task in TUNED}
    plain = {task.name for task in known}
    names = [one.strip() for each in section.task for one in each.split(",") if one.strip()]
    if NQ in names:
        return evaluate_retrieval(section, plugins, settings)
    if section.index is not None:
        raise ConfigError(
            f"`--index {section.index}` needs `--task {NQ}`",
            why="other tasks ask for no block of text",
        )
    if section.finetune:
        from lmcore.cli.evaluate.finetune import finetune

        return finetune(section, _one(names, own, plain), training, plugins, settings)
    _require_training(section)
    heads = {one: _head(Path(one)) for one in section.checkpoints}
    trained = [one for one, head in heads.items() if head]
    asked = [name for name in names if name in own]
    if not trained:
        if only := [name for name in asked if name not in plain]:
            _require_runs(section)
            raise ConfigError(
                f"the task `{only[0]}` needs a head that is trained for it",
                why="none of the checkpoints has a head for a task"
                if section.checkpoints
                else "no checkpoint is given",
                hint=f"`--task {only[0]} --finetune --task-data DIR --save DIR` trains one",
            )
        return None
    if others := [one for one, head in heads.items() if not head]:
        raise ConfigError(
            f"`{trained[0]}` has a head for a task, `{others[0]}` has none",
            hint="give them to two commands",
        )
    shown = f"the head of `{trained[0]}` is for {heads[trained[0]]}"
    hint = f"give one of {', '.join(own)}; or the checkpoint from before its fine-tuning"
    texts = section.text is not None or section.data_path or section.stride is not None
    if texts or section.harness:
        raise ConfigError(
            f"{shown}: it cannot predict a text",
            why="it gives no probabilities of tokens",
            hint=hint,
        )
    if unfit := [name for name in names if name not in own]:
        raise ConfigError(
            f"{shown}: it cannot be scored on the task `{unfit[0]}`",
            why="it gives no probabilities of tokens" if unfit[0] in plain else None,
            hint=hint,
        )
    if not names:
        raise ConfigError("`lmcore evaluate` needs a task", why=shown, hint=hint)
    from lmcore.cli.evaluate.scores import score_heads

    tasks = [own[name] for name in dict.fromkeys(names)]
    return score_heads(section, tasks, plugins, settings, argv)


def _require_training(section: EvaluateSection) -> None:
    """Raise for an option of a training that is not asked for.

    Raises:
        ConfigError: There is one.
    """
    defaults = {option.name: option for option in options_of(type(section))}
    for name in ONLY_FINETUNE:
        if getattr(section, name) != defaults[name].default:
            raise ConfigError(
                f"`{flag_of(name)}` needs `--finetune`",
                why="nothing is trained without it",
                hint="add `--finetune`, or leave it out",
            )


def _require_runs(section: EvaluateSection) -> None:
    """Raise the error of a path that is no checkpoint.

    Raises:
        CheckpointError, ConfigError: There is no checkpoint.
    """
    for one in section.checkpoints:
        if (Path(one) / "best").is_dir():
            raise ConfigError(
                f"`{one}` has the runs of a fine-tuning", hint=f"give the best one: `{one}/best`"
            )
        require_checkpoint(Path(one), section.ckpt_step)


def _one(names: Sequence[str], own: dict[str, TunedTask], plain: Collection[str]) -> TunedTask:
    if len(names) != 1:
        raise ConfigError(
            f"`--finetune` trains one task, and `--task` names {len(names) or 'none'}",
            hint=f"give one of {', '.join(own)}",
        )
    if names[0] not in own:
        raise ConfigError(
            f"`--finetune` has no task `{names[0]}`",
            why="it is scored without training" if names[0] in plain else None,
            hint="leave `--finetune` out"
            if names[0] in plain
            else suggestion(names[0], own) or f"tasks: {', '.join(own)}",
        )
    return own[names[0]]


def _head(path: Path) -> str:
    """Return `--task` of the run at *path*; empty for other checkpoints, and for none."""
    from lmcore.checkpoint import survey

    try:
        return str(survey(path).newest()[1].model_shape.get("task") or "")
    except LmcoreError:
        return ""
