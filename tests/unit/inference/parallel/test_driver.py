"""The model of several processes on rank 0: messages, failures, and waiting ranks."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.inference.parallel.driver import DividedModel, ProcessesError
from lmcore.inference.parallel.messages import Call
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(1, 4, 1, 8, 16, 10)


@dataclass
class Channel:
    """Channel that keeps the messages, and calls as the other ranks read them."""

    calls: list[Call] = field(default_factory=list)
    messages: list[list[str] | None] = field(default_factory=list)

    def send(self, message: Sequence[Call] | None) -> None:
        if message is None:
            self.messages.append(None)
            return
        calls = [Call(*call) for call in json.loads(json.dumps(message))]
        self.calls += calls
        self.messages.append([call.method for call in calls])


@dataclass
class Runner:
    """Part of a model whose passes return zeros, or fail."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    error: Exception | None = None

    def run(self, call: Call, hidden_NH: Tensor | None = None) -> Tensor | None:
        if self.error is not None and call.method == "hidden":
            raise self.error
        return torch.zeros(3, 10) if hidden_NH is not None else torch.zeros(1, 2, 4)


def made(channel: Channel, runner: Runner, *, idle: float = 100.0) -> DividedModel:
    """Return a model."""
    given: Any = (runner, channel)
    return DividedModel(*given, SHAPE, weight_dtype=torch.float32, idle_seconds=idle)


@pytest.fixture
def channel() -> Channel:
    """A channel."""
    return Channel()


@pytest.fixture
def model(channel: Channel) -> Iterator[DividedModel]:
    """A model, closed at the end."""
    one = made(channel, Runner())
    yield one
    one.close()


def test_a_source_is_encoded_by_all_at_once(channel: Channel) -> None:
    """Collectives of the encoder cannot wait for the next pass; changes before it come first."""
    given: Any = (Runner(), channel)
    options = {"weight_dtype": torch.float32, "idle_seconds": 100.0, "answers": True}
    model = DividedModel(*given, SHAPE, **options)
    cache: Any = model.new_cache(torch.float32)
    cache.reserve(1, 8)
    cache.set_source(0, (5, 6))
    assert channel.messages == [["new_cache", "reserve", "set_source"]]
    assert channel.calls[-1] == (0, "set_source", [0, [5, 6]])
    model.close()


def test_changes_travel_with_the_next_pass(model: DividedModel, channel: Channel) -> None:
    """Nothing is sent for a cache alone; a dropped cache is dropped everywhere."""
    cache = model.new_cache(torch.bfloat16)
    cache.reserve(2, 8)
    cache.select([1, 1], 3)
    assert not channel.messages
    model(torch.tensor([[7, 8]]), cache.first_tokens([1], 2))
    assert channel.calls == [
        (None, "new_cache", [0, 1]),
        (0, "reserve", [2, 8]),
        (0, "select", [[1, 1], 3]),
        (None, "hidden", [[[7, 8]], [0, "first_tokens", [[1], 2]]]),
    ]
    del cache
    gc.collect()
    channel.calls.clear()
    assert model.logits(torch.zeros(1, 3, 4)).shape == (1, 3, 10)
    assert channel.calls == [(None, "drop_cache", [0]), (None, "logits", [3])]


def test_a_failed_pass_is_the_end(channel: Channel) -> None:
    """The ranks are at different places: nothing further is sent, not even the end."""
    runner = Runner(error=RuntimeError("out of memory\nmore"))
    model = made(channel, runner)
    with pytest.raises(ProcessesError, match="failed") as caught:
        model(torch.tensor([[7, 8]]))
    assert caught.value.why == "out of memory"
    runner.error, sent = None, len(channel.messages)
    with pytest.raises(ProcessesError, match="ended"):
        model(torch.tensor([[7, 8]]))
    model.close()
    assert len(channel.messages) == sent


def test_an_interrupted_pass(channel: Channel) -> None:
    """Ctrl-C in a pass, or in a change of a cache, is raised after it; the model still works."""

    @dataclass
    class Interrupted(Runner):
        done: int = 0

        def run(self, call: Call, hidden_NH: Tensor | None = None) -> Tensor | None:
            if call.method != "drop_cache":  # by the garbage collection
                signal.raise_signal(signal.SIGINT)
            self.done += 1
            return super().run(call, hidden_NH)

    runner = Interrupted()
    model = made(channel, runner)
    tokens = torch.tensor([[7, 8]])
    with pytest.raises(KeyboardInterrupt):
        model(tokens)
    with pytest.raises(KeyboardInterrupt):
        model.new_cache(torch.float32)
    with pytest.raises(KeyboardInterrupt):
        model.logits(torch.zeros(3, 4))
    assert not model.failed
    assert runner.done == 4
    model.close()
    assert channel.messages == [["hidden"], ["new_cache", "drop_cache", "logits"], None]


def test_a_pass_that_hangs(channel: Channel) -> None:
    """The model is closed all the same, with an error, and nothing further is sent."""
    entered, ends = threading.Event(), threading.Event()

    @dataclass
    class Hanging(Runner):
        def run(self, call: Call, hidden_NH: Tensor | None = None) -> Tensor | None:
            entered.set()
            ends.wait(30)
            return super().run(call, hidden_NH)

    model = made(channel, Hanging())
    thread = threading.Thread(target=model, args=[torch.tensor([[7, 8]])])
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ProcessesError, match=r"not ended within 0\.01 seconds"):
        model.close(0.01)
    assert model.failed
    ends.set()
    thread.join()
    assert channel.messages == [["hidden"]]


def test_ranks_that_do_not_answer(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    """A message without content finds it out: the model has failed, and the log says why."""

    def refuse(_message: Sequence[Call] | None) -> None:
        raise RuntimeError("connection closed\nmore")

    channel.send = refuse  # type: ignore[method-assign]
    model = made(channel, Runner(), idle=0.01)
    model._keeper.join(30)
    assert model.failed
    assert "no longer answer: connection closed" in caplog.text
    model.close()


def test_waiting_ranks_get_messages(channel: Channel) -> None:
    """Without passes a message without content is sent again and again, until the end."""
    model = made(channel, Runner(), idle=0.01)
    deadline = time.monotonic() + 30
    while channel.messages.count([]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    model.close()
    model.close()
    assert channel.messages[:2] == [[], []]
    assert channel.messages.count(None) == 1
    assert channel.messages[-1] is None
