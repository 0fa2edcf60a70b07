"""Rules for the length of a run and its batch size."""

from __future__ import annotations

import pytest

from lmcore.config.load import load_config
from lmcore.config.rules import training
from lmcore.config.validate import problems_of


@pytest.mark.parametrize("line", ["--micro-batch-size 100000000", "--seq-length 1000000000"])
def test_a_micro_batch_larger_than_the_host(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the option, before any index of that many samples is built."""
    monkeypatch.setattr(training, "host_memory", lambda: 32 << 30)
    (problem,) = problems_of(load_config(line.split()), world_size=1)
    assert problem.what == f"`{line}` does not fit the memory of the host"
    assert "the host has 32 GiB" in str(problem.why)
    monkeypatch.setattr(training, "host_memory", lambda: 1 << 60)
    assert problems_of(load_config(line.split()), world_size=1) == []
    monkeypatch.setattr(training, "host_memory", lambda: 1 << 10)
    both = load_config(["--micro-batch-size", "9", "--seq-length", "99"])
    (problem,) = problems_of(both, world_size=1)
    assert "`--micro-batch-size 9` with `--seq-length 99` does not fit" in problem.what


@pytest.mark.parametrize(
    "line, world_size, step",
    [
        ("--train-samples 4 --micro-batch-size 2", 4, 8),
        ("--train-samples 1 --micro-batch-size 2", 4, 8),
        ("--train-samples 4 --micro-batch-size 2", 2, None),
        ("--train-samples 4 --micro-batch-size 2 --global-batch-size 8", 2, 8),
        ("--train-samples 4 --rampup-batch-size 8 8 64 --global-batch-size 16", 1, 8),
    ],
)
def test_fewer_samples_than_a_step(line: str, world_size: int, step: int | None) -> None:
    """The first step of all processes counts, and there is one problem at most."""
    problems = problems_of(load_config(line.split()), world_size=world_size)
    hints = [] if step is None else [f"use `--train-samples {step}` or more, or a smaller batch"]
    assert [problem.hint for problem in problems] == hints


@pytest.mark.parametrize(
    "line, steps",
    [
        ("--train-iters 30", 30),
        ("--train-samples 100 --rampup-batch-size 4 4 2000 --global-batch-size 32", 25),
        ("--train-samples 100 --global-batch-size 16", 6),
        ("--train-samples 100", 25),
    ],
)
def test_a_profile_after_the_last_step(line: str, steps: int) -> None:
    """The steps of a length in samples are counted with the sizes that they have."""
    for end, found in ((steps, 0), (steps + 1, 1)):
        profile = f"--profile --profile-step-start 0 --profile-step-end {end}"
        loaded = load_config(f"{line} --micro-batch-size 2 {profile}".split())
        problems = problems_of(loaded, world_size=2)
        assert len(problems) == found
        assert all(f"after the last step, {steps}" in problem.what for problem in problems)
