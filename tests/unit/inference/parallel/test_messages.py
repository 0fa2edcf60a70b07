"""Messages to the ranks of a model: calls come out as they went in."""

from __future__ import annotations

import pytest
import torch

from lmcore.inference.parallel.messages import Call, MessageChannel


class Wire(MessageChannel):
    """Channel whose broadcasts go to a list, or come from one."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        super().__init__(torch.device("cpu"))
        self.sent, self.receives = sent, False

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.receives:
            tensor.copy_(self.sent.pop(0))
        else:
            self.sent.append(tensor)


@pytest.mark.parametrize(
    "tokens, broadcasts", [(0, 1), (1, 1), (2020, 1), (2021, 2), (2024, 2), (9000, 2)]
)
def test_messages_of_any_length(tokens: int, broadcasts: int) -> None:
    """Short messages need one broadcast, longer ones two."""
    calls = [Call(0, "reserve", [2, 9]), Call(None, "hidden", [[[7] * tokens], None])]
    sent: list[torch.Tensor] = []
    wire = Wire(sent)
    wire.send(calls)
    assert len(sent) == broadcasts
    wire.receives = True
    assert wire.receive() == calls
    assert not sent


def test_messages_without_calls() -> None:
    """The message of a model that is not in use, and of one that is closed, differ."""
    wire = Wire([])
    wire.send([])
    wire.send(None)
    wire.receives = True
    assert wire.receive() == []
    assert wire.receive() is None
