"""The question which learning-rate schedule follows, asked or refused before a run resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.base.errors import CheckpointError, printable

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.train.resume.schedule import ScheduleChoice

__all__ = ["decide_schedule"]


def decide_schedule(plan: RunPlan, environ: Mapping[str, str]) -> str | None:
    """Return the user's choice of a schedule; None if the settings decide.

    The question is asked only if standard input and standard error are a terminal and no launcher
    started this process.  Everybody else gets the error here, before a device is started, unless
    other settings differ too: then `check_same_run` names all differences at once.

    Args:
        plan: The run; `plan.resume` is the checkpoint that it continues from.
        environ: Environment variables.

    Raises:
        ConfigError: Nothing says which schedule follows.
    """
    from lmcore.train.resume.saved_run import check_saved_run
    from lmcore.train.resume.schedule import schedule_choices, schedule_is_open

    resume, asked = plan.resume, plan.config.checkpoint
    if resume is None or asked.finetune:
        return None
    asks = _can_ask(environ)
    try:
        own_schedule = asked.override_opt_param_scheduler
        check_saved_run(resume.checkpoint, resume.manifest, own_schedule=own_schedule)
    except CheckpointError:
        if asks:
            raise
        return None  # training names what is wrong
    if not schedule_is_open(plan, resume.manifest):
        return None
    from lmcore.optim.schedule import LearningRateSchedule
    from lmcore.train.resume.schedule import refuse_open_schedule

    answer = None
    if asks and plan.train_iters > resume.manifest.iteration:
        own = LearningRateSchedule.from_plan(plan)
        answer = _answer(plan, schedule_choices(plan, resume.manifest, own))
    if answer is None:
        refuse_open_schedule(plan, resume.manifest)
    return answer


def _can_ask(environ: Mapping[str, str]) -> bool:
    """Return True if there is a user to ask."""
    from lmcore.runtime.launch.rank import started_by_launcher

    is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and _is_in_foreground()
    return is_terminal and not started_by_launcher(environ)


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
    prompt = f"Which schedule should be used: {' or '.join(names)}? "
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
