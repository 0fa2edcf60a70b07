"""Settings that have no effect because the condition that their option declares is not met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcore.config.need import RESUMES, Need, Situation
from lmcore.config.option import Option
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

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
            yield ConfigError(
                f"{loaded.shown(option.name)} needs {need.words}",
                why=need.refused,
                hint=f"add {need.words}, or leave it out",
            )


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
            needed.setdefault(shown, []).append(need.words)
    rows = [f"{shown} (needs {' and '.join(words)})" for shown, words in needed.items()]
    if of_resumes:
        rows.append(
            f"{', '.join(of_resumes)} (only for a run that continues: from "
            f"`{settings.config.checkpoint.load}`, a checkpoint of another program, a run begins "
            "at step 0 with the weights alone)"
        )
    return f"settings without effect: {', '.join(rows)}" if rows else None


def _situation(
    config: Config, layout: ParallelLayout | None = None, *, loss_scaling: bool | None = None
) -> Situation:
    if loss_scaling is None:
        loss_scaling = _LOSS_SCALING.get(config.accelerator.precision or "")
    return Situation(config, layout, loss_scaling)


def _unmet(settings: LoadedConfig | RunPlan, situation: Situation) -> Iterator[tuple[Option, Need]]:
    """Yield each option that a flag or file gives, with each of its conditions that is not met.

    A default in a file sets nothing, nor does a switch that keeps its default, or a value of a
    preset that a run recorded.
    """
    for option in settings.options.values():
        origin, value = settings.provenance[option.name], settings.config.value(option)
        by_user = origin.kind in {"flag", "file"} and not origin.origin.startswith("preset")
        if not option.needs or not by_user:
            continue
        if value == option.default and (origin.kind == "file" or isinstance(value, bool)):
            continue
        if value is None or value == ():
            continue
        for need in option.needs:
            if value not in need.off and not need.met(situation):
                yield option, need


def _shown(settings: LoadedConfig | RunPlan, option: Option) -> str:
    origin, value = settings.provenance[option.name], settings.config.value(option)
    words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if origin.kind == "file":
        return f"`{option.key}: {words}` of {origin}"
    own = origin.detail.replace("_", "-") in option.flags
    return f"`{origin.detail} {words}`" if own and option.type is not bool else f"`{origin.detail}`"
