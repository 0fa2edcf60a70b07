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
