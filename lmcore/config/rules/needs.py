"""Settings that have no effect because the condition that their option declares is not met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.config.derived.model_math import family_name
from lmcore.config.need import RESUMES, Need, Situation
from lmcore.config.option import Option
from lmcore.config.options.help import flag_form
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig, UnreadSettingError, value_text

if TYPE_CHECKING:
    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.config.plan import RunPlan
    from lmcore.config.section import Config

__all__ = ["NEED_RULES", "note_without_effect"]

_LOSS_SCALING = {"fp32": False, "bf16": False, "fp16": True}
"""Precision policies known before the run: True for one that has a loss scale."""


def _required(loaded: LoadedConfig) -> Problems:
    """Refuse settings whose condition is not met, if their declaration says so."""
    for option, need in _unmet(loaded, _situation(loaded.config)):
        if need.refused and loaded.value(option.name) != option.default:
            added = _with_conditions(need.words, loaded)
            yield ConfigError(
                f"{loaded.shown(option.name)} needs {need.words}",
                why=need.refused,
                hint=f"add {added}, or {loaded.removal(option.name)}",
            )


def _with_conditions(words: str, loaded: LoadedConfig) -> str:
    """Return a condition that is a flag alone with the flag's value, and what it needs itself."""
    flags = {f"`{option.flag}`": option for option in loaded.options.values()}
    option = flags.get(words)
    if option is None:
        return words
    situation = _situation(loaded.config)
    needed = [need.words for need in option.needs if need.refused and not _met(need, situation)]
    return " and ".join([f"`{flag_form(option)}`", *needed])


NEED_RULES: tuple[Rule, ...] = (_required,)


def note_without_effect(
    settings: LoadedConfig | RunPlan,
    *,
    layout: ParallelLayout | None = None,
    loss_scaling: bool | None = None,
) -> str | None:
    """Return one line that names each given setting without effect; None if there is none.

    Args:
        settings: Settings, with their provenance.
        layout: Parallel layout; None if the number of processes is not known yet.
        loss_scaling: True if the precision policy has a loss scale; None if the policy is not
            known yet.
    """
    situation = _situation(settings.config, layout, loss_scaling=loss_scaling)
    needed: dict[str, list[str]] = {}
    of_resumes: dict[str, None] = {}
    foreign = settings.provenance["finetune"].kind == "checkpoint"
    for option, need in _unmet(settings, situation):
        shown = _shown(settings, option)
        if foreign and need.words == RESUMES:  # `--no-finetune` would be refused
            of_resumes[shown] = None
        else:
            needed.setdefault(shown, []).append(need.reason)
    rows = [
        f"{shown} ({' and '.join([first, *(one.removeprefix('needs ') for one in others)])})"
        for shown, (first, *others) in needed.items()
    ]
    if of_resumes:
        rows.append(
            f"{', '.join(of_resumes)} (only for a run that continues: from "
            f"`{settings.config.checkpoint.load}`, a checkpoint of another program without the "
            "state of a run, a run begins at step 0)"
        )
    return f"ignored: {', '.join(rows)}" if rows else None


def _situation(
    config: Config, layout: ParallelLayout | None = None, *, loss_scaling: bool | None = None
) -> Situation:
    if loss_scaling is None:
        loss_scaling = _LOSS_SCALING.get(config.accelerator.precision or "")
    return Situation(config, layout, loss_scaling, family_name(config.model))


def _unmet(settings: LoadedConfig | RunPlan, situation: Situation) -> Iterator[tuple[Option, Need]]:
    """Yield each option that a flag or file gives, with each of its conditions that is not met.

    A default in a file sets nothing, nor does a switch that keeps its default.  A value that a run
    recorded in its `config.yaml` was named at that run's start: only edited ones are a choice.
    """
    unread = settings.unread if isinstance(settings, LoadedConfig) else ()
    for option in settings.options.values():
        if option.name in unread:
            continue
        origin, value = settings.provenance[option.name], settings.config.value(option)
        if not option.needs or not origin.by_user or origin.origin:
            continue
        if value == option.default and (origin.kind == "file" or isinstance(value, bool)):
            continue
        if value is None or value == ():
            continue
        for need in option.needs:
            if value not in need.off and not _met(need, situation):
                yield option, need


def _met(need: Need, situation: Situation) -> bool:
    """Return True if a condition is met, or depends on a setting that could not be read."""
    try:
        return need.met(situation)
    except UnreadSettingError:
        return True


def _shown(settings: LoadedConfig | RunPlan, option: Option) -> str:
    origin, value = settings.provenance[option.name], settings.config.value(option)
    words = value_text(value)
    if origin.kind == "file":
        return f"`{option.key}: {words}` of {origin}"
    own = origin.detail.replace("_", "-") in option.flags
    return f"`{origin.detail} {words}`" if own and option.type is not bool else f"`{origin.detail}`"
