"""Messages to the ranks of a model: commands come out as they went in."""

from __future__ import annotations

import pytest
import torch

from lmcore.generation.parallel.messages import Kind, MessageChannel, commands_in, encoded


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
    "tokens, broadcasts", [(0, 1), (1, 1), (503, 1), (504, 1), (505, 2), (4000, 2)]
)
def test_messages_of_any_length(tokens: int, broadcasts: int) -> None:
    """Short messages need one broadcast, longer ones two."""
    commands = [(Kind.RESERVE, [0, 2, 9]), (Kind.LOGITS, list(range(tokens)))]
    sent: list[torch.Tensor] = []
    wire = Wire(sent)
    wire.send(encoded(commands))
    assert len(sent) == broadcasts
    wire.receives = True
    found = [(kind, [*given]) for kind, given in commands_in(wire.receive())]
    assert found == commands
    assert not sent
