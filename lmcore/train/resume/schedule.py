"""Learning-rate schedule of a run that resumes: the checkpoint's, or one that the user chooses.

The schedule in force is saved in each checkpoint.  It continues as long as the settings from which
a schedule is made equal the settings of the run that wrote the checkpoint.  If they differ, most
often because the run is longer now, `--schedule` says which of three schedules follows.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, counted
from lmcore.base.log import ALL_RANKS
from lmcore.config.option import CHECKED
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.resume.saved_run import part_of, setting_pair

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import RunPlan
    from lmcore.train.state import TrainState

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {"lowest", "decay_samples"}
"""Fields of a constant schedule that do not change its rates."""

_OF_A_SCHEDULE = re.compile(r"lr|min_lr|lr_(warmup|decay|cooldown)_\w+", re.ASCII)
"""Names of the options that a learning-rate schedule is made from, beside the length."""

_SCHEDULE_OPTIONS = {
    "style": "lr_decay_style",
    "highest": "lr",
    "lowest": "min_lr",
    "warmup_samples": "lr_warmup_samples",
    "decay_samples": "lr_decay_samples",
    "cooldown_fraction": "lr_cooldown_fraction",
}
"""Option names of the fields of a learning-rate schedule."""


@dataclass(frozen=True)
class ScheduleChoice:
    """One answer to the question which schedule follows.

    Attributes:
        name: Value of `--schedule`.
        meaning: The schedule in words.
        schedule: The schedule.
        next_rate: Rate of the next step.
        last_rate: Rate of the last step of the run.
        steps: Number of remaining steps.
        last_from: Step from which the rate is `last_rate`; None if only the last step has it.
    """

    name: str
    meaning: str
    schedule: LearningRateSchedule
    next_rate: float
    last_rate: float
    steps: int
    last_from: int | None = None

    @property
    def is_zero(self) -> bool:
        """True if the rate of every remaining step is 0; False for the last step of a decay.

        Only a warm-up raises the rate, from above 0, so the next step's decides.
        """
        return self.next_rate == 0 and self.steps > 1

    @property
    def words(self) -> str:
        """Meaning and consequences, one line."""
        if self.is_zero:
            return f"{self.meaning}: not possible, the rate of every remaining step would be 0"
        end = "at the end" if self.last_from is None else f"from step {self.last_from:,} on"
        rates = f"{self.next_rate:.3g} at the next step, {self.last_rate:.3g} {end}"
        return f"{self.meaning}: rate {rates}"


def saved_schedule(manifest: Manifest) -> LearningRateSchedule:
    """Return the schedule in force in a checkpoint, which `check_saved_run` has checked."""
    return LearningRateSchedule(**manifest.meta["schedule"])


def scheduled_samples(manifest: Manifest) -> int:
    """Return the position of a checkpoint in its learning-rate schedule, in samples."""
    counters = manifest.meta["counters"]
    return int(counters.get("scheduled_samples", counters["consumed_samples"]))


def changed_fields(manifest: Manifest, own: LearningRateSchedule) -> dict[str, tuple[Any, Any]]:
    """Return the fields of the schedule that the settings change: value before, value now.

    Empty if the checkpoint's schedule continues.

    Args:
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.
        own: Schedule of the run's own settings.
    """
    before, now = dataclasses.asdict(_schedule_of_settings(manifest)), dataclasses.asdict(own)
    constant = before["style"] == own.style == "constant"
    ignored = set(_WITHOUT_EFFECT) if constant else set()
    position = scheduled_samples(manifest)
    if own.style == "constant" and position >= max(before["warmup_samples"], own.warmup_samples):
        ignored.add("warmup_samples")
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name not in ignored and before[name] != value
    }


def schedule_is_open(plan: RunPlan, manifest: Manifest) -> bool:
    """Return True if the schedule changes and no setting says which one follows.

    Args:
        plan: The run that resumes.
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.
    """
    asked = plan.config.checkpoint
    answered = asked.schedule or asked.use_checkpoint_opt_param_scheduler
    if answered or asked.override_opt_param_scheduler or asked.finetune:
        return False
    return bool(changed_fields(manifest, LearningRateSchedule.from_plan(plan)))


def schedule_choices(
    plan: RunPlan, manifest: Manifest, own: LearningRateSchedule
) -> tuple[ScheduleChoice, ...]:
    """Return the three schedules that may follow, with their consequences.

    Args:
        plan: The run that resumes.
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.
        own: Schedule of the run's own settings.
    """
    position, consumed = scheduled_samples(manifest), manifest.meta["counters"]["consumed_samples"]
    left, sizes = max(plan.train_iters - manifest.iteration, 0), plan.batch_sizes

    def after(step: int) -> int:
        """Return the position in the schedule after *step* of the remaining steps."""
        return position + sizes.samples(step, consumed)

    next_step, end = after(1), after(left)
    saved, longer = saved_schedule(manifest), _extended(plan, own)
    again = _restarted(plan, own, position, end)

    def choice(name: str, meaning: str, schedule: LearningRateSchedule) -> ScheduleChoice:
        first = bisect.bisect_left(range(left), _end_of_decay(schedule), key=lambda n: after(n + 1))
        last_from = None if first + 1 >= left else manifest.iteration + first + 1
        rates = schedule(next_step), schedule(end)
        return ScheduleChoice(name, meaning, schedule, *rates, left, last_from)

    whole, rest = counted(plan.train_iters, "step"), counted(left, "step")
    return (
        choice("extend", f"the schedule of a run of {whole} from its first step", longer),
        choice("keep", "the checkpoint's schedule as it is", saved),
        choice("restart", f"a new warm-up and decay over the remaining {rest}", again),
    )


def refuse_open_schedule(plan: RunPlan, manifest: Manifest) -> None:
    """Refuse a run that does not say which schedule follows, before a device is started.

    Nothing is refused if other settings of data, model or optimizer differ too: `check_same_run`
    will name all differences at once.

    Args:
        plan: The run that resumes.
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.

    Raises:
        ConfigError: The schedule is the only difference, and no setting says which one follows.
    """
    config = part_of(manifest.meta, "config", "config")
    for option in plan.options.values():
        if option.on_resume == CHECKED and not _OF_A_SCHEDULE.fullmatch(option.name):
            saved, now = setting_pair(plan, option, config)
            if saved != now:
                return
    problem = schedule_problem(plan, manifest, LearningRateSchedule.from_plan(plan))
    if problem is not None:
        raise problem


def schedule_problem(
    plan: RunPlan, manifest: Manifest, schedule: LearningRateSchedule
) -> ConfigError | None:
    """Return the error for a changed schedule if no setting says which one follows.

    Args:
        plan: The run that resumes.
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.
        schedule: Learning-rate schedule of the run's own settings.
    """
    if not schedule_is_open(plan, manifest):
        return None
    changed = changed_fields(manifest, schedule)
    rows = (
        "`{}`: checkpoint {}, this run {}".format(_SCHEDULE_OPTIONS[name], *_rounded(*values))
        for name, values in changed.items()
    )
    what, why = "the learning-rate schedule is not the checkpoint's", "; ".join(rows)
    unit = "iters" if plan.config.training.train_samples is None else "samples"
    settings = f"the first run's settings (`--lr-decay-{unit}` if only the length changed)"
    if plan.train_iters <= manifest.iteration:
        why += f"; no step remains after the {manifest.iteration:,} of the checkpoint"
        hint = f"give {settings}, or more steps"
        return ConfigError(what, why=why, hint=hint)
    choices = schedule_choices(plan, manifest, schedule)
    why = "\n".join([why, *(f"`{choice.name}` is {choice.words}" for choice in choices)])
    names = [f"`--schedule {choice.name}`" for choice in choices if not choice.is_zero]
    choose = f"choose one by {' or '.join(names)}; or " if names else ""
    hint = f"{choose}give {settings}"
    return ConfigError(what, why=why, hint=hint)


def _rounded(*values: Any) -> list[str]:
    """Return two values for a message, rounded to 10 digits unless they would look equal."""
    short = [f"{value:.10g}" if isinstance(value, float) else str(value) for value in values]
    return short if len(set(short)) == len(values) else [str(value) for value in values]


def resumed_schedule(
    plan: RunPlan, manifest: Manifest, schedule: LearningRateSchedule
) -> LearningRateSchedule:
    """Return the learning-rate schedule of a run that resumes.

    Args:
        plan: The run.
        manifest: Manifest of the checkpoint, checked by `check_saved_run`.
        schedule: Learning-rate schedule of the run's own settings.
    """
    asked = plan.config.checkpoint
    if asked.override_opt_param_scheduler:
        return schedule
    saved = saved_schedule(manifest)
    changed = changed_fields(manifest, schedule)
    if asked.schedule in {"extend", "restart"} and changed:
        choices = schedule_choices(plan, manifest, schedule)
        (chosen,) = (choice for choice in choices if choice.name == asked.schedule)
        logger.info("learning rate: %s", chosen.words)
        return chosen.schedule
    replaced = [
        f"`{option}` {getattr(schedule, name):g} -> {getattr(saved, name):g}"
        if name != "style"
        else f"`{option}` {schedule.style} -> {saved.style}"
        for name, option in _SCHEDULE_OPTIONS.items()
        if name in changed and getattr(schedule, name) != getattr(saved, name)
    ]
    if replaced:
        logger.info("the checkpoint's learning-rate schedule is used: %s", ", ".join(replaced))
    return saved


def check_learning_rate(plan: RunPlan, state: TrainState) -> None:
    """Refuse a run whose remaining steps all have learning rate 0; warn of a part of them.

    A run of one step, which tries whether training works, is not refused.

    Args:
        plan: The run.
        state: State before the next step: its schedule, and its position in run and schedule.

    Raises:
        ConfigError: The rate of every remaining step is 0.
    """
    schedule, sizes = state.schedule, plan.batch_sizes
    steps = range(1, plan.train_iters - state.iteration + 1)

    def is_zero(step: int) -> bool:
        done = sizes.samples(step, state.consumed_samples)
        return schedule(state.scheduled_samples + done) == 0

    # The rate is above 0 in the warm-up and never rises after it: the first 0 divides the steps.
    count = len(steps) - bisect.bisect_left(steps, 1, key=is_zero)
    if count == len(steps) == 1 and not state.iteration:
        logger.warning(
            "the only step of the run has learning rate 0, at which no weight changes: the decay "
            "to 0 ends with it; `--min-lr` or `--lr-decay-style constant` keeps the rate above 0",
            extra=ALL_RANKS,
        )
    if count <= 1:  # the last step of a decay to 0
        return
    ended = f"the decay ends after {schedule.decay_samples:,} samples, at rate 0"
    if count == len(steps):
        raise ConfigError(
            "the learning rate of every remaining step is 0",
            why=ended,
            hint="`--schedule extend` or `--schedule restart` continues above 0, if the run is "
            "longer now or another setting of the schedule differs, such as `--min-lr`",
        )
    logger.warning("the last %d steps have learning rate 0: %s", count, ended, extra=ALL_RANKS)


def _end_of_decay(schedule: LearningRateSchedule) -> float:
    """Return the samples from which the rate is the lowest; infinite for a constant rate."""
    if schedule.style == "constant":
        return math.inf
    # The other styles have reached the lowest rate at the end, this one falls to it after the end;
    # so does every style if warm-up takes all of the decay.
    falls = schedule.style == "inverse-square-root"
    end = max(schedule.decay_samples + falls, math.floor(schedule.warmup_samples) + 1)
    return schedule.start_samples + end


def _schedule_of_settings(manifest: Manifest) -> LearningRateSchedule:
    """Return the schedule of the settings of the run that wrote a checkpoint.

    It is not always the schedule in force, which is returned if the settings are not recorded.
    """
    config, derived = (part_of(manifest.meta, "config", name) for name in ("config", "derived"))
    optimizer = part_of(config, "optimizer")
    style = optimizer.get("lr_decay_style")
    numbers: list[Any] = [
        *(optimizer.get(name) for name in ("lr", "min_lr")),
        *(derived.get(name) for name in ("lr_warmup_samples", "lr_decay_samples")),
        optimizer.get("lr_cooldown_fraction"),
    ]
    if not isinstance(style, str) or any(type(one) not in {int, float} for one in numbers):
        return saved_schedule(manifest)
    return LearningRateSchedule(style, *numbers)


def _extended(plan: RunPlan, own: LearningRateSchedule) -> LearningRateSchedule:
    """Return the run's schedule with its decay until the end, unless a flag gives its length."""
    if any(_is_flag(plan, name) for name in ("lr_decay_iters", "lr_decay_samples")):
        return own
    warmup = _warmup_samples(plan, own, plan.train_samples)
    return dataclasses.replace(own, warmup_samples=warmup, decay_samples=plan.train_samples)


def _restarted(
    plan: RunPlan, own: LearningRateSchedule, position: int, end: int
) -> LearningRateSchedule:
    """Return a schedule that begins at *position* and ends at *end*, in samples."""
    length = max(end - position, 1)
    warmup = min(_warmup_samples(plan, own, length), length)
    return dataclasses.replace(
        own, warmup_samples=warmup, decay_samples=length, start_samples=position
    )


def _warmup_samples(plan: RunPlan, own: LearningRateSchedule, decay: int) -> float:
    fraction = plan.config.optimizer.lr_warmup_fraction
    return own.warmup_samples if fraction is None else fraction * decay


def _is_flag(plan: RunPlan, name: str) -> bool:
    origin: Mapping[str, Any] = plan.provenance
    return name in origin and origin[name].kind == "flag"
