"""`lmcore ask --chat`: a conversation with a server, and its commands."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, RunError
from lmcore.cli.text.dialogue import Dialogue
from lmcore.generation.chat.template import ChatTemplate
from lmcore.inference.load import LoadedModel
from lmcore_serve.client import Client, ClientError
from lmcore_serve.command.ask import AskSection, _Talk
from lmcore_serve.command.ask import run as ask

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
    """The commands equal `lmcore generate --chat`'s; an empty line is skipped."""
    lines = ["Hi", "So", "/reset", "Hi", " ", "", "//ab", "/system T", "Hi", "/system", "Hi"]
    found = talk(chat, monkeypatch, *lines, "/help", "/exit", "Hi")
    answer = found[1][2]
    assert len(answer) == 4
    assert found == [
        ["S", "Hi"],
        ["S", "Hi", answer, "So"],
        ["S", "Hi"],
        ["S", "Hi", answer, "/ab"],
        ["T", "Hi"],
        ["Hi"],
    ]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6
    assert err.count("(stopped at the limit of 4 tokens)") == 6
    assert "(forgot all messages)\n" in err
    assert "/system TEXT " in err


def test_no_template(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is for the user of the command."""
    with pytest.raises(RunError, match="has no chat template") as caught:
        talk(server, monkeypatch, "Hi")
    assert caught.value.hint == "leave out `--chat` to continue texts"


def test_wrong_flags() -> None:
    """Wrong flags are found without the server."""
    with pytest.raises(ConfigError, match="exclude each other"):
        ask(["localhost:1", "--prompt", "a", "--top-k", "5", "--top-p", "0.5"])
    with pytest.raises(ConfigError, match="the prompt is not UTF-8"):
        ask(["localhost:1", "--prompt", "\udcff"])


def test_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C stops an answer with a note, and an error ends nothing."""
    Script(monkeypatch, ["A", KeyboardInterrupt()], [ClientError("gone")], ["B"])
    lines = io.StringIO("a\n/no\nb\nc\n")
    monkeypatch.setattr(lines, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", lines)
    assert ask(["localhost:1", "--chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "A\nB\n"
    assert err.startswith("/help lists the commands")
    notes = [line.removeprefix("you> ") for line in err.splitlines()]
    assert notes.count("(stopped)") == 1
    assert "error: `/no` is not a command" in notes
    assert "error: gone" in notes


def test_errors(chat: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown command, and a conversation that is full, say what to enter."""
    with pytest.raises(ConfigError, match="`/nothing` is not a command"):
        talk(chat, monkeypatch, "/nothing")
    with pytest.raises(RunError, match="refused the request") as caught:
        talk(chat, monkeypatch, "x" * 95)
    assert "96 positions" in str(caught.value.why)
    assert caught.value.hint == "`/reset` forgets the messages"


class Script:
    """Answers in place of a server's: parts, and then an error or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Sequence[Any]) -> None:
        self.seen: list[list[str]] = []
        self._answers = iter(answers)
        monkeypatch.setattr(Client, "chat", lambda _self, *given: self._chat(*given))
        monkeypatch.setattr(Client, "complete", lambda _self, *given: self._chat([], given))

    def _chat(self, messages: Sequence[Mapping[str, str]], _settings: Any) -> Iterator[str]:
        self.seen.append([one["content"] for one in messages])
        for part in next(self._answers):
            if not isinstance(part, str):
                raise part
            yield part


def test_what_a_conversation_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers, and begun ones that the user stopped; after an error it is as before."""
    section = AskSection("localhost:1", chat=True)
    stop, broken = KeyboardInterrupt(), ClientError("the connection broke")
    script = Script(monkeypatch, ["A"], ["B", broken], [stop], ["", stop], ["C", stop], ["D"])
    talk = _Talk(section, Client(section.address), Dialogue(io.StringIO(), prompt=""))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    talk.take("a")
    for line, error in (("b", RunError), *(("s", KeyboardInterrupt),) * 2, ("c", type(stop))):
        with pytest.raises(error):
            talk.take(line)
    talk.take("d")
    assert script.seen[1:5] == [["a", "A", one] for one in ("b", "s", "s", "c")]
    assert script.seen[5] == ["a", "A", "c", "C", "d"]


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """A terminal gets none of a model; a file or a pipe gets the text as it is."""
    Script(monkeypatch, ["a\x1b[31m\tb"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert ask(["localhost:1", "--prompt", "x"]) == 0
    found = capsys.readouterr().out
    assert ("\x1b" in found) is not terminal
    assert found.startswith("a")
    assert found.endswith("b\n")
