"""The question which learning-rate schedule follows, asked on a terminal before a run resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.errors import printable

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.train.resume.schedule_change import ScheduleChoice

__all__ = ["ask_schedule"]


def ask_schedule(plan: RunPlan, environ: Mapping[str, str]) -> str | None:
    """Return the user's choice of a schedule; None if there is none to make, or nobody to ask.

    The question is asked only if standard input and standard error are a terminal and no launcher
    started this process.  Without an answer the run ends later with an error that names the choices
    and all other differences.

    Args:
        plan: The run; `plan.resume` is the checkpoint that it continues from.
        environ: Environment variables.
    """
    from lmcore.runtime.launch.rank import started_by_launcher

    resume = plan.resume
    if resume is None or plan.config.checkpoint.finetune or started_by_launcher(environ):
        return None
    if not (sys.stdin.isatty() and sys.stderr.isatty() and _is_in_foreground()):
        return None
    from lmcore.optim.schedule import LearningRateSchedule
    from lmcore.train.resume.saved_meta import check_saved_run
    from lmcore.train.resume.schedule_change import schedule_choices, schedule_is_open

    own_schedule = plan.config.checkpoint.override_opt_param_scheduler
    check_saved_run(resume.checkpoint, resume.manifest, own_schedule=own_schedule)
    is_over = plan.train_iters <= resume.manifest.iteration
    if is_over or not schedule_is_open(plan, resume.manifest):
        return None
    own = LearningRateSchedule.from_plan(plan)
    return _answer(plan, schedule_choices(plan, resume.manifest, own))


def _is_in_foreground() -> bool:
    """Return True if this process may read from its terminal; a background job is stopped."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the controlling terminal, which stops nobody
        return True


def _answer(plan: RunPlan, choices: tuple[ScheduleChoice, ...]) -> str | None:
    """Ask until one of the choices is given; return None for an empty line or at the end."""
    assert plan.resume is not None, "asked only then"
    step = plan.resume.manifest.iteration
    lines = [f"the learning-rate schedule differs from that of the checkpoint of step {step:,}:"]
    lines += [f"  {choice.name:<8} {choice.words}" for choice in choices]
    names = [choice.name for choice in choices if not choice.is_zero]
    if not names:
        return None
    prompt = f"which one follows: {' or '.join(names)}? "
    sys.stderr.write(printable("\n".join(lines)) + "\n")
    while True:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        word = sys.stdin.readline()
        if not word.endswith("\n"):
            sys.stderr.write("\n")
        word = word.strip().lower()
        if not word:
            return None
        found = [name for name in names if name.startswith(word)]
        if len(found) == 1:
            return found[0]
