"""Ranks other than 0 of a model in several processes: they run the commands that they receive."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lmcore.generation.parallel.messages import Command, Kind, encoded
from lmcore.generation.parallel.start import _run_messages
from lmcore.generation.text_model import Execution


def test_a_lazy_device_runs_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded work runs after each command, except at the end and while rank 0 is idle."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stay
    done: list[Any] = []

    messages: list[list[Command]] = [
        [(Kind.RESERVE, [0, 1, 8]), (Kind.WHOLE_PASS, [1, 1, 5])],
        [(Kind.IDLE, [])],
        [(Kind.LOGITS, [1]), (Kind.CLOSE, [])],
    ]

    class Channel:
        def receive(self) -> list[int]:
            return encoded(messages.pop(0))

    class Runner:
        def run(self, command: Command) -> None:
            done.append(command[0])

    runner: Any = Runner()
    channel: Any = Channel()
    _run_messages(runner, channel, Execution(step_boundary=lambda: done.append("boundary")))
    assert done == [
        *(Kind.RESERVE, "boundary", Kind.WHOLE_PASS, "boundary"),
        *(Kind.LOGITS, "boundary"),
    ]
