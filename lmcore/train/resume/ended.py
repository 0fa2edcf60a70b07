"""A run that has ended: finished, so that there is nothing to do, or cut, so that it continues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointError
from lmcore.checkpoint.layout import CHECKPOINTS_NAME, parse_iteration, survey
from lmcore.checkpoint.manifest import MANIFEST_NAME
from lmcore.checkpoint.verify import own_problems
from lmcore.config.continued import continue_command
from lmcore.config.option import FREE, flag_of
from lmcore.runtime.process.channel import Channel
from lmcore.train.resume.saved_run import check_saved_run, part_of, setting_pair
from lmcore.train.resume.validation_history import STOPPED_EARLY, ValidationHistory

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

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
    save = plan.config.checkpoint.save
    if save is not None and Path(save).resolve() != directory.resolve():
        return None  # its last checkpoint is saved to the new directory
    try:
        own = plan.config.checkpoint.override_opt_param_scheduler
        check_saved_run(resume.checkpoint, manifest, own_schedule=own)
    except CheckpointError:
        return None  # training names what is wrong
    summary = finished_summary(plan, directory, manifest.iteration, ValidationHistory.of(plan))
    if summary is None or _differs(plan, manifest.meta):
        return None
    if own_problems(resume.checkpoint, manifest, Channel(None)):
        return None  # training continues from an earlier checkpoint, or names the damage
    return nothing_left(directory, summary, plan.length_option)


def finished_summary(
    plan: RunPlan, directory: Path, step: int, history: ValidationHistory
) -> dict[str, Any] | None:
    """Return the content of `summary.json` of a run that is finished; None if it is not.

    `finished_run` calls it before torch is imported, if no setting differs, and the run report
    after the checkpoint was loaded, which is when a change of settings is known to be allowed.

    Args:
        plan: The run.
        directory: The run directory.
        step: Step of the checkpoint from which the run would continue.
        history: Validation losses in that checkpoint.
    """
    status = "completed"
    if step < plan.train_iters:
        if history.early_stop_reason(plan, step) is None:
            return None
        status = STOPPED_EARLY
    try:
        summary = json.loads(read_bounded_file(directory / "summary.json", _MAX_BYTES))
        complete = summary["status"].partition(":")[0] == status and summary["iteration"] == step
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(summary) if complete else None


def nothing_left(directory: Path, summary: Mapping[str, Any], length_option: str) -> str:
    """Return the line about a finished run.

    Args:
        directory: The run directory.
        summary: Content of its `summary.json`.
        length_option: Name of the option that sets the length of the run.
    """
    state, more = "is complete", f"{flag_of(length_option)} N` trains longer"
    if summary["status"] != "completed":
        state, more = "stopped early", "--early-stop none` continues it"
    return (
        f"nothing is left to train: `{directory}` {state} at step {summary['iteration']:,}; "
        f"nothing changed; `{continue_command(directory)} {more}"
    )


def _differs(plan: RunPlan, meta: Mapping[str, Any]) -> bool:
    """Return True if a setting that matters when a run resumes is not the checkpoint's."""
    config = part_of(meta, "config", "config")
    for option in plan.options.values():
        saved, now = setting_pair(plan, option, config)
        if option.on_resume != FREE and saved != now:
            return True
    return False


class ResumeHint:
    """The command that continues a run which an error or a signal ended at once.

    It is printed last, after the error, if the run directory has a checkpoint.
    """

    def __init__(self, directory: Path | None, start: Path | None) -> None:
        """Note the checkpoints in the run directory, without reading them.

        Args:
            directory: The run directory; None if it is a new one.
            start: Checkpoint from which the run starts; None without one.
        """
        self._start = start
        self._before = set() if directory is None else _times(directory)

    def line(self, directory: Path) -> str | None:
        """Return the line with the command; None if the directory has no complete checkpoint.

        A run that returned to an earlier checkpoint and saved none continues from that one.

        Args:
            directory: The run directory.
        """
        try:
            path, manifest = survey(directory / CHECKPOINTS_NAME).newest()
        except (CheckpointError, OSError):
            return None
        named, step = directory, manifest.iteration
        start, saved = self._start, _times(directory) - self._before
        if not saved and start is not None and start.resolve() != path.resolve():
            named, step = start, parse_iteration(start.name) or 0
        return f"to continue from step {step:,}: `{continue_command(named)}`"


def _times(directory: Path) -> set[tuple[str, int]]:
    """Return name and time of each checkpoint in a run directory."""
    found = set()
    for path in (directory / CHECKPOINTS_NAME).glob(f"iter_*/{MANIFEST_NAME}"):
        with contextlib.suppress(OSError):
            found.add((path.parent.name, path.stat().st_mtime_ns))
    return found
