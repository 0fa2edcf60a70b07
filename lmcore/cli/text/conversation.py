"""Commands within a conversation, and notes of the ends of its answers, the same for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from lmcore.base.errors import ConfigError, counted

__all__ = ["BANNER", "PROMPT", "Conversation", "end_note", "take_message"]

PROMPT = "you>"
"""Text before each line of the user."""
BANNER = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends."
"""First line on a terminal."""

_HELP = """\
/system TEXT   set the system prompt and forget all messages
/reset         forget all messages but the system prompt
/exit          end; so does Ctrl-D
//TEXT         send /TEXT
Ctrl-C stops an answer."""


class Conversation(Protocol):
    """Messages of a user and a model, none at first.

    Attributes:
        system: System prompt.
    """

    system: str | None

    def reset(self) -> None:
        """Forget all messages but the system prompt."""


def take_message(
    line: str,
    conversation: Conversation,
    *,
    answer: Callable[[str], None],
    note: Callable[[str], None],
) -> bool:
    """Obey a line that is a command, or answer it; return False if it ends the conversation.

    Args:
        line: Line of the user.
        conversation: The messages so far.
        answer: Called with the text of a message.
        note: Called with what a command has to say.

    Raises:
        ConfigError: There is no such command.
    """
    if not line.startswith("/"):
        answer(line)
        return True
    if line.startswith("//"):
        answer(line[1:])
        return True
    name, _, rest = line.strip().partition(" ")
    match name, rest.strip():
        case "/exit", "":
            return False
        case "/help", "":
            note(_HELP)
        case "/reset", "":
            conversation.reset()
            note("(forgot all messages)")
        case "/system", text:
            conversation.system = text or None
            conversation.reset()
            note("(new system prompt)" if text else "(no system prompt)")
        case _:
            raise ConfigError(
                f"`{line.strip()[:100]}` is not a command",
                hint="the commands are `/system TEXT`, `/reset`, `/help` and `/exit`; `//` begins "
                "a message with a slash",
            )
    return True


def end_note(
    end: Literal["tokens", "positions", "interrupt"], num_tokens: int | None = None
) -> str:
    """Return the note of a text that neither the model nor a stop text ended.

    Args:
        end: The largest number of tokens, the last position of the model, or Ctrl-C.
        num_tokens: Number of tokens; None: it is not known.
    """
    if end == "interrupt":
        return "(stopped)"
    if end == "positions":
        return "(stopped at the last position of the model)"
    limit = "tokens" if num_tokens is None else counted(num_tokens, "token")
    return f"(stopped at the limit of {limit})"
