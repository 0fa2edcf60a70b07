"""Recognition of a run that is finished: submitted again, it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.bounded_file import read_bounded_file
from lmcore.checkpoint.verify import own_problems
from lmcore.config.continued import continue_command
from lmcore.config.option import FREE
from lmcore.runtime.process.channel import Channel
from lmcore.train.resume.saved_meta import part_of, setting_pair

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["finished_run", "finished_summary", "nothing_left"]

_MAX_BYTES = 1 << 24


def finished_run(plan: RunPlan) -> str | None:
    """Return the line that says that the run is finished; None if it is not, or not surely.

    The files of the checkpoint are compared with their checksums.

    Args:
        plan: The run; `plan.resume` is the checkpoint that it would continue from.
    """
    resume = plan.resume
    if resume is None or plan.config.checkpoint.finetune:
        return None
    manifest, directory = resume.manifest, resume.checkpoint.parent.parent
    finished = finished_summary(plan, directory, manifest.iteration) is not None
    if not finished or _differs(plan, manifest.meta):
        return None
    if own_problems(resume.checkpoint, manifest, Channel(None)):
        return None  # training continues from an earlier checkpoint, or names the damage
    return nothing_left(directory, manifest.iteration)


def finished_summary(plan: RunPlan, directory: Path, step: int) -> dict[str, Any] | None:
    """Return the content of `summary.json` of a run that is finished; None if it is not.

    `finished_run` calls it before torch is imported, if no setting differs, and the run report
    after the checkpoint was loaded, which is when a change of settings is known to be allowed.

    Args:
        plan: The run.
        directory: The run directory.
        step: Step of the checkpoint from which the run would continue.
    """
    if step < plan.train_iters:
        return None
    try:
        summary = json.loads(read_bounded_file(directory / "summary.json", _MAX_BYTES))
        complete = summary["status"] == "completed" and summary["iteration"] == step
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(summary) if complete else None


def nothing_left(directory: Path, step: int) -> str:
    """Return the line about a finished run.

    Args:
        directory: The run directory.
        step: Number of steps done.
    """
    return (
        f"nothing is left to train: `{directory}` is complete at step {step:,}; nothing changed; "
        f"`{continue_command(directory)} --train-iters N` trains longer"
    )


def _differs(plan: RunPlan, meta: Mapping[str, Any]) -> bool:
    """Return True if a setting that matters when a run resumes is not the checkpoint's."""
    config = part_of(meta, "config", "config")
    for option in plan.options.values():
        saved, now = setting_pair(plan, option, config)
        if option.on_resume != FREE and saved != now:
            return True
    return False
