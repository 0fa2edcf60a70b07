"""`lmcore ask --chat`: a conversation with a server, and its commands."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from lmcore.cli.ask import run as ask
from lmcore.errors import RunError
from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.load import LoadedModel
from lmcore.serving.client import Client

from .conftest import Server, running_server

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def chat(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model that chats."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")
    with running_server(
        loaded, change=lambda model: dataclasses.replace(model, template=template)
    ) as made:
        yield made
    template.close()


def talk(chat: Server, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[list[str]]:
    """Send lines as a pipe does; return the messages of each request."""
    seen = []
    real = Client.chat

    def noted(
        self: Client, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> Iterator[str]:
        seen.append([one["content"] for one in messages])
        return real(self, messages, settings)

    monkeypatch.setattr(Client, "chat", noted)
    content = "".join(f"{line}\n" for line in lines).encode()
    piped: Any = io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr(sys, "stdin", piped)
    flags = ["--chat", "--system-prompt", "S", "--tokens", "4", "--temperature", "0"]
    assert ask([f"127.0.0.1:{chat.port}", *flags]) == 0
    return seen


def test_commands(
    chat: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/reset` forgets the messages but the system's; `//` sends a slash; `/exit` ends."""
    found = talk(chat, monkeypatch, "Hi", "So", "/reset", "Hi", "//ab", "/exit", "Hi")
    answer = found[1][2]
    assert len(answer) == 4
    assert found == [
        ["S", "Hi"],
        ["S", "Hi", answer, "So"],
        ["S", "Hi"],
        ["S", "Hi", answer, "/ab"],
    ]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_errors(chat: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown command, and a conversation that is full, say what to enter."""
    with pytest.raises(RunError, match="`/nothing` is no command"):
        talk(chat, monkeypatch, "/nothing")
    with pytest.raises(RunError, match="refused the request") as caught:
        talk(chat, monkeypatch, "x" * 95)
    assert "96 positions" in str(caught.value.why)
    assert caught.value.hint == "`/reset` forgets the messages"
