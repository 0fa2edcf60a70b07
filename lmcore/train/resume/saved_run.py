"""Record of a run in its checkpoint: the manifest's `meta`, checked and read part by part.

A checkpoint may come from any program: any part of `meta` may be missing or have another type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointArgumentError, CheckpointError, ConfigError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.file.paths import absolute_paths
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.section.data import BLEND_RULES, OLDER_RULES, SPLIT_RULES
from lmcore.optim.schedule import wrong_fields

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.config.option import Option
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.order import OrderRecord

OLDER_SETTINGS: Mapping[str, Any] = {
    **OLDER_RULES,
    "calculate_per_token_loss": False,
    "include_padding_in_loss": True,
}
"""Settings of runs whose checkpoint does not record them, which are not the defaults of today."""

_COUNTERS = ("iteration", "consumed_samples", "consumed_tokens")


def check_saved_run(checkpoint: Path, manifest: Manifest, *, own_schedule: bool = False) -> None:
    """Refuse a checkpoint whose manifest lacks the state of a run.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        own_schedule: True if the run has a different learning-rate schedule
            (`--override-opt-param-scheduler`), so that the checkpoint, which may be of another
            program, needs none.

    Raises:
        CheckpointError: Parts are missing or wrong; the message names them.
    """
    has_schedule = "schedule" in manifest.meta
    wrong = [*_problems(manifest.meta, schedule=has_schedule or not own_schedule)]
    if not wrong:
        return
    converted = part_of(manifest.meta, "converted_from")
    origin = "it was converted, and the checkpoint of the other program"
    if converted:
        origin = f"it was converted from {converted.get('format')}, and `{converted.get('name')}`"
    if converted and "counters" not in manifest.meta:
        run = shlex.quote(str(checkpoint.parent.parent))
        raise CheckpointArgumentError(
            f"no run can continue from checkpoint `{checkpoint}`",
            why=f"{origin} has weights alone, without step and optimizer",
            hint=f"`lmcore train --load {run} --use-checkpoint-args --finetune` starts a run with "
            "them",
        )
    if not has_schedule and all(name.startswith("schedule.") for name in wrong):
        raise CheckpointArgumentError(
            f"checkpoint `{checkpoint}` has no learning-rate schedule to continue",
            why=f"{origin} had none that is read",
            hint="`--override-opt-param-scheduler`, instead of `--schedule`, continues with the "
            "learning-rate schedule of this run's settings; or take the weights alone by `--load` "
            "and `--finetune`",
        )
    raise CheckpointError(
        f"no run can continue from checkpoint `{checkpoint}`",
        why="its manifest does not have what a run saves: "
        + ", ".join(f"`meta.{name}`" for name in wrong),
        hint="use another checkpoint, or take its weights alone by `--finetune`",
    )


def data_rules(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Return the rules of the data order of a checkpoint's run, by option name.

    A checkpoint that records none is of an older version, which had the rules `OLDER_RULES`.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.

    Raises:
        CheckpointError: A recorded rule is not known.
    """
    saved = part_of(manifest.meta, "config", "config", "data")
    rules = {name: saved.get(name, older) for name, older in OLDER_RULES.items()}
    for name, known in (("split_rule", SPLIT_RULES), ("blend_rule", BLEND_RULES)):
        if rules[name] not in known:
            raise CheckpointError(
                f"no run can continue from checkpoint `{checkpoint}`",
                why=f"its `{name}` is {rules[name]!r}; known are {', '.join(known)}",
                hint=f"use the version that wrote it, lmcore {manifest.lmcore_version}, or take "
                "its weights alone by `--finetune`",
            )
    return rules


def saved_order(plan: RunPlan) -> OrderRecord | None:
    """Return the order of the samples in the checkpoint that the run resumes.

    None if the run starts from initial weights, if the checkpoint does not record the order of its
    samples, and with `--finetune` or `--override-data-order`.

    Raises:
        CheckpointError: The manifest lacks what a run needs to continue.
        ConfigError: `--change-blend`, and the checkpoint has no record of its sources.
    """
    from lmcore.conversion.native.manifest import UNKNOWN_ORDER
    from lmcore.data.blend.dataset import BlendRecord
    from lmcore.data.blend.order import OrderRecord

    asked, resume = plan.config.checkpoint, plan.resume
    if resume is None or asked.finetune or asked.override_data_order:
        return None
    checkpoint, manifest = resume.checkpoint, resume.manifest
    check_saved_run(checkpoint, manifest, own_schedule=asked.override_opt_param_scheduler)
    meta = manifest.meta
    if meta["data_order"] == UNKNOWN_ORDER and not asked.change_blend:
        return None
    record = meta.get("data")
    if record is None and asked.change_blend:
        raise ConfigError(
            f"`--change-blend`: `{checkpoint}` does not say what was read of which source",
            why="it is of a cyclic order, or of an older version",
            hint="`--override-data-order` continues without keeping count",
        )
    return OrderRecord(
        meta["data_order"],
        meta["counters"]["consumed_samples"],
        None if record is None else BlendRecord.from_dict(record),
        all(getattr(plan.config.data, name) == rule for name, rule in resume.data_rules.items()),
    )


def read_saved_settings(path: Path, step: str | None) -> SavedSettings:
    """Return the settings in a checkpoint, with the tokenizer that its run directory holds.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.
        step: Value of `--ckpt-step`; None for the newest checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it records no settings.
        ConfigError: The step is not a number or `best`.
    """
    from lmcore.checkpoint import chosen_checkpoint, survey  # only if needed: it takes time
    from lmcore.conversion.formats import unrecognized
    from lmcore.data.tokenizer.saved import saved_tokenizer_settings

    if (problem := unrecognized(path)) is not None:
        raise problem
    if step is not None:
        path = chosen_checkpoint(path, step)
    checkpoint, manifest = survey(path).newest()
    config, sources = (part_of(manifest.meta, "config", name) for name in ("config", "sources"))
    if not config:
        raise CheckpointArgumentError(
            f"checkpoint `{checkpoint}` does not record the settings of its run",
            why="its manifest has no `meta.config`",
            hint="give the settings as flags or in a file, and the checkpoint by `--load`",
        )
    tokenizer = saved_tokenizer_settings(checkpoint.parent.parent / "tokenizer")
    return SavedSettings(str(checkpoint), config, sources, tokenizer)


def setting_pair(plan: RunPlan, option: Option, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the value of an option in a checkpoint's settings, and in the run that resumes.

    Both are in the form of JSON, with absolute paths; a value that is not recorded is the default
    of the version that wrote the checkpoint.

    Args:
        plan: The run that resumes.
        option: One of the run's options.
        config: The `config.config` of the checkpoint's `meta`.
    """
    path = ("plugins", option.plugin) if option.plugin else (option.section,)
    default = OLDER_SETTINGS.get(option.name, option.default)
    saved = part_of(config, *path).get(option.key, default)
    with contextlib.suppress(TypeError, AttributeError):  # another type is a difference
        saved = absolute_paths(option, saved)
    now = absolute_paths(option, plan.value(option))
    return _listed(saved), _listed(now)


def part_of(meta: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the nested mapping in *meta* under *names*; empty if there is none."""
    found: Any = meta
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _listed(value: Any) -> Any:
    """Return *value* as JSON returns it: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


def _problems(meta: Mapping[str, Any], *, schedule: bool) -> Iterator[str]:
    """Yield the paths of missing or wrong values."""
    counters = part_of(meta, "counters")
    for name in dict.fromkeys((*_COUNTERS, *counters)):
        if not _is_number(counters.get(name), whole=True):
            yield f"counters.{name}"
    if schedule:
        yield from (f"schedule.{name}" for name in wrong_fields(part_of(meta, "schedule")))
    if not isinstance(meta.get("data_order"), str):
        yield "data_order"
    if meta.get("layout") is not None:
        yield from _layout(meta["layout"])
    if not isinstance(meta.get("loss_scale", {}), Mapping):
        yield "loss_scale"
    if "validation" in meta:
        yield from _validation(meta["validation"])


def _layout(saved: object) -> Iterator[str]:
    if not isinstance(saved, Mapping):
        yield "layout"
        return
    for field in dataclasses.fields(ParallelLayout):
        value = saved.get(field.name, field.default)
        if type(value) is not type(field.default) or (type(value) is int and value < 0):
            yield f"layout.{field.name}"


def _validation(saved: object) -> Iterator[str]:
    counts = {"best_step", "without_improvement"}
    names = counts | {"best_loss", "reference_loss"}
    if not isinstance(saved, Mapping) or saved.keys() != names:
        yield "validation"
        return
    for name in sorted(names):
        if not _is_number(saved[name], whole=name in counts):
            yield f"validation.{name}"


def _is_number(value: object, *, whole: bool = False) -> bool:
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    return type(value) in kinds and 0 <= value < math.inf  # type: ignore[operator]
