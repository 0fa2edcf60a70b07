"""`lmcore generate --chat` and `--interactive`: texts for one line after another of a user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, counted
from lmcore.cli.text.conversation import BANNER, PROMPT, end_note, take_message
from lmcore.cli.text.dialogue import LINES_BANNER, Dialogue
from lmcore.cli.text.sample_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcore.generation.chat.conversation import Answer
    from lmcore.generation.chat.template import ChatTemplate
    from lmcore.generation.text.sampler import SamplingSettings
    from lmcore.inference.load import LoadedModel

__all__ = ["chat", "continue_lines", "find_template"]


def find_template(loaded: LoadedModel, file: str | None, *, load: str) -> ChatTemplate:
    """Return the chat template of a file, or of the model's tokenizer.

    Args:
        loaded: The model.
        file: File of the template; None: the tokenizer's.
        load: Value of `--load`, for messages.

    Raises:
        ConfigError: There is none.
    """
    from lmcore.generation.chat.template import ChatTemplate

    if file is not None:
        return ChatTemplate.from_file(file, loaded.tokenizer)
    found = ChatTemplate.of(loaded.tokenizer)
    if found is None:
        raise ConfigError(
            f"`{load}` has no chat template",
            why=f"no template is kept with its `{loaded.tokenizer.name}`: the model may not have "
            "been trained for conversations",
            hint="give one by `--chat-template FILE`, or use `--interactive`, which continues text",
        )
    return found


def chat(
    settings: SamplingSettings,
    loaded: LoadedModel,
    template: ChatTemplate,
    *,
    system: str | None,
    waits: Callable[[], None],
) -> None:
    """Answer each line of the user as a message of one conversation.

    Args:
        settings: Length of each answer, and the choice of its tokens.
        loaded: The model.
        template: Its chat template.
        system: System prompt.
        waits: See `Dialogue`.

    Raises:
        ConfigError: A message from a pipe does not fit, is not UTF-8, or the template refuses it.
        RunError: The model's logits are not finite.
    """
    from lmcore.generation.chat.conversation import Answers, Conversation

    dialogue = Dialogue(standard_output(), prompt=PROMPT, banner=BANNER, waits=waits)
    conversation = Conversation(Answers(settings, loaded), template, system=system)

    def answer(text: str) -> None:
        turn = conversation.begin(text)
        if turn.dropped:
            dialogue.note(
                f"(forgot the oldest {counted(turn.dropped, 'message')}: the conversation does "
                "not fit the model's positions)"
            )
        found = conversation.answer(turn, dialogue.write)
        dialogue.end_text()
        _note_end(found, dialogue)

    try:
        dialogue.lines(
            lambda line: take_message(line, conversation, answer=answer, note=dialogue.note)
        )
    finally:
        template.close()


def continue_lines(
    settings: SamplingSettings, loaded: LoadedModel, *, waits: Callable[[], None]
) -> None:
    """Continue each line of the user by itself.

    Args:
        settings: Length of each text, and the choice of its tokens.
        loaded: The model.
        waits: See `Dialogue`.

    Raises:
        ConfigError: A line from a pipe does not fit, or is not UTF-8.
        RunError: The model's logits are not finite.
    """
    from lmcore.generation.chat.conversation import Answers
    from lmcore.generation.text.prompt import encode_prompt

    dialogue = Dialogue(standard_output(), prompt="prompt>", banner=LINES_BANNER, waits=waits)
    answers = Answers(settings, loaded)

    def take(line: str) -> bool:
        prompt = encode_prompt(loaded.tokenizer, line)
        first = True

        def show(piece: str) -> None:
            nonlocal first
            if first and not loaded.reads_source:
                dialogue.write(line, bold=True)
            first = False
            dialogue.write(piece)

        answer = answers.answer(prompt, show)
        dialogue.end_text()
        _note_end(answer, dialogue)
        return True

    dialogue.lines(take)


def _note_end(answer: Answer, dialogue: Dialogue) -> None:
    """Say why a text ended, unless the model or a stop text ended it."""
    if answer.end == "interrupt" and not dialogue.interactive:
        raise KeyboardInterrupt
    if answer.end != "stop":
        dialogue.note(end_note(answer.end, answer.num_tokens))
