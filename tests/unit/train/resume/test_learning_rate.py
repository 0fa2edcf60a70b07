"""Learning rate of the remaining steps: what a run announces is what its steps do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.resolve import RunPlan, resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.model.shape import ModelShape
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.resume import schedule
from lmcore.train.resume.compare import comparable_shape
from lmcore.train.resume.schedule import check_learning_rate, schedule_choices

REFUSED = "refused"
ONLY = "only"


@dataclass(frozen=True)
class Position:
    """A run between two steps, with the counters of `TrainState`."""

    schedule: LearningRateSchedule
    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0

    def steps(self, plan: RunPlan, skipped: frozenset[int] = frozenset()) -> Iterator[Any]:
        """Yield the position and learning rate after each step that the training loop takes."""
        at, sizes = self, plan.batch_sizes
        while at.iteration < plan.train_iters:
            size = sizes.at(at.consumed_samples)
            update = 0 if at.iteration in skipped else size
            at = replace(
                at,
                iteration=at.iteration + 1,
                consumed_samples=at.consumed_samples + size,
                scheduled_samples=at.scheduled_samples + update,
            )
            yield at, self.schedule(at.scheduled_samples)

    def manifest(self, plan: RunPlan) -> Any:
        """Return the manifest of a checkpoint at this position."""
        names = ("iteration", "consumed_samples", "scheduled_samples")
        meta = {
            "schedule": asdict(self.schedule),
            "counters": {name: getattr(self, name) for name in names},
            "config": plan.to_dict(),
        }
        return SimpleNamespace(meta=meta, iteration=self.iteration)


def plan_of(flags: str) -> RunPlan:
    loaded = load_config(flags.split())
    return resolve(validate(loaded), tokenizer=TokenizerIdentity(vocab_size=257))


def announced(plan: RunPlan, position: Position) -> str | int:
    """Return how many last steps are said to have learning rate 0, or that the run is refused."""
    with mock.patch.object(schedule.logger, "warning") as warning:
        try:
            check_learning_rate(plan, position)  # type: ignore[arg-type] - all that it reads
        except ConfigError:
            return REFUSED
    if not warning.call_args:
        return 0
    text, *values = warning.call_args.args
    if "the only step" in text:
        return ONLY
    assert text.startswith("the last %d steps have learning rate 0")
    return int(values[0])


def happens(plan: RunPlan, position: Position) -> str | int:
    """Return what should be announced, from each step of the training loop."""
    rates = [rate for _, rate in position.steps(plan)]
    zeros = rates.count(0)
    assert rates[len(rates) - zeros :] == [0] * zeros, "the rate rises again"
    if zeros == len(rates) == 1 and not position.iteration:
        return ONLY
    if zeros <= 1:
        return 0
    return REFUSED if zeros == len(rates) else zeros


def test_the_ramp_of_a_short_run() -> None:
    """50 steps of 2 samples, long before the final 16: only the last has rate 0."""
    flags = "--rampup-batch-size 2 2 1_000 --global-batch-size 16 --micro-batch-size 2"
    plan = plan_of(f"{flags} --train-samples 100")
    start = Position(LearningRateSchedule.from_plan(plan))
    assert [rate == 0 for _, rate in start.steps(plan)] == [False] * 49 + [True]
    assert announced(plan, start) == 0
    after_44 = replace(start, iteration=44, consumed_samples=88, scheduled_samples=88)
    assert announced(plan, after_44) == 0
    shorter = plan_of(f"{flags} --train-samples 16")
    assert announced(shorter, Position(LearningRateSchedule.from_plan(shorter))) == 0
    decayed = plan_of(f"{flags} --train-samples 100 --lr-decay-samples 50")
    schedule = LearningRateSchedule.from_plan(decayed)
    assert announced(decayed, Position(schedule)) == 26
    assert announced(decayed, replace(after_44, schedule=schedule)) == REFUSED


@given(data=st.data())
def test_what_is_announced_is_what_happens(data: st.DataObject) -> None:
    """Steps, zero rates, errors, and every schedule of a continuation, over ramps and exits."""

    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    micro, count = draw(1, 3), draw(0, 6)
    start, increment = micro * draw(1, 4), micro * draw(1, 4)
    flags = f"--micro-batch-size {micro} --global-batch-size {start + count * increment} --lr 0.01"
    if count:
        flags += f" --rampup-batch-size {start} {increment} {draw(1, 300)}"
    style = data.draw(st.sampled_from(["cosine", "linear", "constant", "constant-cooldown"]))
    flags += f" --lr-decay-style {style}"
    flags += f" --lr-warmup-fraction {data.draw(st.sampled_from([0, 0.05, 0.5, 1]))}"
    if style != "constant":
        flags += f" --min-lr {data.draw(st.sampled_from([0, 0.001]))}"
    samples = draw(start, 300)
    decay = f" --lr-decay-samples {draw(1, 400)}" if style != "constant" and draw(0, 3) == 0 else ""
    plan = plan_of(f"{flags} --train-samples {samples}{decay}")

    begin = Position(LearningRateSchedule.from_plan(plan))
    skipped = data.draw(st.frozensets(st.integers(0, 10), max_size=3))
    steps = list(begin.steps(plan, skipped))
    assert len(steps) == plan.train_iters
    assert announced(plan, begin) == happens(plan, begin)
    left = samples - steps[-1][0].consumed_samples
    assert 0 <= left < plan.batch_sizes.at(samples - left), "another step would fit"

    at, _ = steps[draw(0, len(steps) - 1)]  # the run exits here
    assert announced(plan, at) == happens(plan, at)
    longer = plan_of(f"{flags} --train-samples {samples + draw(0, 300)}")
    own = LearningRateSchedule.from_plan(longer)
    for choice in schedule_choices(longer, at.manifest(plan), own):
        resumed = replace(at, schedule=choice.schedule)
        rates = [rate for _, rate in resumed.steps(longer)]
        assert choice.steps == len(rates)
        assert announced(longer, resumed) == happens(longer, resumed)
        assert choice.is_zero == (happens(longer, resumed) == REFUSED)
        if not rates:
            continue
        assert (choice.next_rate, choice.last_rate) == (rates[0], rates[-1])
        over = [n for n, rate in enumerate(rates) if rates[n:] == [rates[-1]] * (len(rates) - n)]
        stays = len(over) > 1 and choice.schedule.style != "constant"
        if choice.last_from is not None:
            assert choice.last_from == at.iteration + over[0] + 1
        elif stays:  # rates of the warm-up or before the cool-down, which end with the run
            assert rates[-1] == choice.schedule.highest


def test_choices_of_another_validation() -> None:
    """A question with more choices makes no other model; more classes do."""
    shape = ModelShape(1, 8, 1, 16, 4, 32, task="multiple-choice", num_labels=3)
    saved = shape.to_dict()
    more = replace(shape, num_labels=4)
    assert comparable_shape(more, saved, finetune=False) == saved
    classes = replace(more, task="classification")
    saved |= {"task": "classification"}
    assert comparable_shape(classes, saved, finetune=False)["num_labels"] == 4
