"""Ranks other than 0 of a model in several processes: they make the calls that they receive."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.inference.parallel.messages import Call
from lmcore.inference.parallel.start import _make_calls, divided_shape
from lmcore.inference.text_model import Execution
from lmcore.model.shape import ModelShape


def test_a_lazy_device_computes_after_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded work runs after each call, except at the end and while rank 0 is idle."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stay
    done: list[Any] = []

    reserve, hidden = Call(0, "reserve", [1, 8]), Call(None, "hidden", [[[5]], None])
    messages = [[reserve, hidden], [], [Call(None, "logits", [1])], None]

    class Channel:
        def receive(self) -> list[Call] | None:
            return messages.pop(0)

    class Runner:
        def run(self, call: Call) -> None:
            done.append(call.method)

    runner: Any = Runner()
    channel: Any = Channel()
    _make_calls(runner, channel, Execution(step_boundary=lambda: done.append("boundary")))
    assert done == ["reserve", "boundary", "hidden", "boundary", "logits", "boundary"]


SHAPE = ModelShape(3, 24, 6, 40, 32, 257, num_query_groups=2)


@pytest.mark.parametrize("tensor, rows", [(1, 257), (2, 258)])
def test_padded_vocabulary(tensor: int, rows: int) -> None:
    """Rows are added until the ranks divide them; nothing else changes."""
    found = divided_shape(SHAPE, ParallelLayout(tensor=tensor, pipeline=3))
    assert found == replace(SHAPE, padded_vocab_size=rows)


@pytest.mark.parametrize(
    "layout, problems",
    [
        (ParallelLayout(tensor=3), ["does not divide the model's 2 heads of keys and values and"]),
        (ParallelLayout(tensor=5), ["model's 6 attention heads and 2 heads of keys"]),
        (ParallelLayout(pipeline=4), ["it has 3 layers"]),
        (ParallelLayout(tensor=3, pipeline=4), ["parallel-size 3`", "parallel-size 4`"]),
    ],
)
def test_problems_at_once(layout: ParallelLayout, problems: list[str]) -> None:
    """Each message has the model's numbers."""
    with pytest.raises(ConfigError) as caught:
        divided_shape(SHAPE, layout)
    for problem in problems:
        assert re.search(re.escape(problem), caught.value.render())


def test_an_encoder_has_no_pipeline() -> None:
    """Tensor parallelism divides its heads; a pipeline is refused with the reason."""
    further = {"decoder_num_layers": 2, "t5_feed_forward": "gelu", "t5_head_bias": True}
    shape = replace(SHAPE, model_family="t5", further=tuple(sorted(further.items())))
    assert divided_shape(shape, ParallelLayout(tensor=2)).padded_vocab_size == 258
    with pytest.raises(ConfigError, match="not supported by generation with T5 models"):
        divided_shape(shape, ParallelLayout(pipeline=2))
