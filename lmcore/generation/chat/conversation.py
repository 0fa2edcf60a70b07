"""`Conversation`: messages of a user and answers of a chat model, as far as its positions go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.text.answers import Answer, Answers

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True)
class Turn:
    """A message of the user that an answer follows.

    Attributes:
        prompt: Tokens of the conversation up to the answer.
        dropped: Number of the oldest messages that were dropped for lack of positions.
    """

    prompt: tuple[int, ...]
    dropped: int


class Conversation:
    """Messages so far, and the next answer.

    Attributes:
        messages: Messages after the system prompt, in order.
        system: System prompt; None: there is none.
    """

    def __init__(
        self, answers: Answers, template: ChatTemplate, *, system: str | None = None
    ) -> None:
        """Begin without messages.

        Args:
            answers: Generation of the answers.
            template: Chat template of the model.
            system: System prompt.
        """
        self._answers, self._template = answers, template
        self.system = system
        self.messages: list[dict[str, str]] = []

    def begin(self, text: str) -> Turn:
        """Add a message of the user.

        If the conversation leaves too little room for the answer, its oldest messages are dropped,
        each with its answer.  After an error the messages are as before.

        Args:
            text: The message.

        Raises:
            ConfigError: The message alone does not fit the model's positions, or the template
                refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        before = len(messages)
        while True:
            prompt = self._template.prompt_tokens([*self._first(), *messages])
            if self._answers.room(prompt) >= self._answers.reserve or len(messages) == 1:
                break
            del messages[0]
            while messages[0]["role"] != "user":
                del messages[0]
        if self._answers.room(prompt) == 0:
            what = "the message and the system prompt have" if self.system else "the message has"
            raise ConfigError(
                f"{what} {len(prompt)} tokens, too many for the model",
                why=f"the model has {self._answers.positions} positions",
                hint="shorten the message",
            )
        self.messages = messages
        return Turn(tuple(prompt), before - len(messages))

    def answer(self, turn: Turn, show: Callable[[str], None]) -> Answer:
        """Generate the answer to the last message and add it to the messages.

        After an error the message is not among them.

        Args:
            turn: The message.
            show: Called with each new piece of the text.

        Raises:
            RunError: The model's logits are not finite.
        """
        try:
            answer = self._answers.answer(turn.prompt, show)
        except Exception:
            del self.messages[-1]
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages = []

    def _first(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]
