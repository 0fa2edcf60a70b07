"""`lmcore ask`: ask a server for text, from a terminal or in a pipe."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from lmcore.base.errors import ConfigError, RunError
from lmcore.cli.text.conversation import BANNER, PROMPT, end_note, take_message
from lmcore.cli.text.dialogue import LINES_BANNER, Dialogue
from lmcore.cli.text.sample_output import standard_output
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_with_plugins
from lmcore.generation.options import MAX_SEED
from lmcore.generation.sampling.options import MAX_TEMPERATURE, MAX_TOP_K
from lmcore_serve.client import Client, ClientError

__all__ = ["AskSection", "run"]

_TOKENS = 64
"""Most tokens of an answer where `--tokens` is not given and there is no conversation."""

_EPILOG = """\
  lmcore ask localhost:5000
  echo 'Once upon a time' | lmcore ask localhost:5000 --tokens 50
  lmcore ask localhost:5000 --chat"""


@dataclass(frozen=True)
class AskSection:
    """Send prompts to a running lmcore or Megatron-LM server."""

    address: str = option(REQUIRED, "Server, such as localhost:5000 or https://HOST/PATH.")
    prompt: str | None = option(
        None,
        "Text to continue; default: each line of standard input, or of a terminal.",
        may_be_empty=True,
    )
    tokens: int | None = option(
        None,
        f"Most tokens of an answer; default: {_TOKENS}, with --chat the server's limit.",
        minimum=1,
    )
    chat: bool = option(False, "Hold a conversation: the model sees the messages before.")
    system_prompt: str | None = option(None, "With --chat: system message.", metavar="TEXT")
    temperature: float | None = option(
        None,
        "Divisor of the logits; 0: the most probable token.",
        minimum=0,
        maximum=MAX_TEMPERATURE,
    )
    top_p: float | None = option(
        None, "Sample from the smallest set with this probability.", above=0, maximum=1
    )
    top_k: int | None = option(None, "Sample from this many tokens.", minimum=0, maximum=MAX_TOP_K)
    seed: int | None = option(
        None,
        "Seed of the random numbers; default: any.",
        minimum=-MAX_SEED - 1,
        maximum=MAX_SEED,
    )
    stop: tuple[str, ...] = option((), "Texts that end an answer.", metavar="TEXT")
    model: str | None = option(
        None, "Name of the model; default: the server's first.", metavar="NAME"
    )
    api_key_file: str | None = option(
        None, "File with the API key in its first line.", metavar="FILE"
    )
    timeout: float = option(600.0, "Seconds to wait for the next part of an answer.", above=0)


def run(argv: list[str]) -> int:
    """Run `lmcore ask` and return the exit status."""
    section, _ = parse_with_plugins(
        AskSection, argv, command="lmcore ask", positionals=("address",), epilog=_EPILOG
    )
    if section.system_prompt is not None and not section.chat:
        raise ConfigError("`--system-prompt` needs `--chat`")
    if section.top_k and section.top_p is not None and section.top_p < 1:
        raise ConfigError("`--top-k` and `--top-p` exclude each other", hint="keep one of them")
    client = Client(section.address, _key(section), section.timeout)
    if section.prompt is not None:
        _Talk(section, client, Dialogue(standard_output(), prompt="")).answer(section.prompt)
        return 0
    if section.chat:
        dialogue = Dialogue(standard_output(), prompt=PROMPT, banner=BANNER)
    else:
        dialogue = Dialogue(standard_output(), prompt="prompt>", banner=LINES_BANNER)
    talk = _Talk(section, client, dialogue)
    dialogue.lines(talk.take)
    return 0


class _Talk:
    """Prompts and answers of one command.

    Attributes:
        system: System prompt of the conversation.
    """

    def __init__(self, section: AskSection, client: Client, dialogue: Dialogue) -> None:
        self._section, self._client, self._dialogue = section, client, dialogue
        self._messages: list[dict[str, str]] = []
        self.system = section.system_prompt

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._messages = []

    def take(self, line: str) -> bool:
        """Answer a line, or obey it; return False if it ends the conversation."""
        if self._section.chat:
            return take_message(line, self, answer=self._noted, note=self._dialogue.note)
        self._noted(line)
        return True

    def _noted(self, text: str) -> None:
        """Answer a line, and say why the answer ended."""
        try:
            end = self.answer(text)
        except KeyboardInterrupt:
            if not self._dialogue.interactive:
                raise
            self._dialogue.end_text()
            self._dialogue.note(end_note("interrupt"))
            return
        if end == "length":
            self._dialogue.note(end_note("tokens", self._most_tokens))

    def answer(self, text: str) -> str | None:
        """Print the answer to a text as it arrives; return the reason of its end, if it has one.

        A conversation keeps both if the answer is complete, or was interrupted after its begin.

        Raises:
            ConfigError: The text is not UTF-8.
            RunError: The server does not answer, or refuses the request.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("the prompt is not UTF-8") from None
        answer, end = "", None
        user = {"role": "user", "content": text}

        def parts() -> Iterator[str]:
            nonlocal end
            end = yield from self._parts(user)

        try:
            for part in parts():
                answer += part
                self._dialogue.write(part)
        except ClientError as error:
            raise self._explained(error) from None
        except KeyboardInterrupt:
            if answer:
                self._keep(user, answer)
            raise
        self._keep(user, answer)
        self._dialogue.end_text()
        return end

    def _explained(self, error: ClientError) -> RunError:
        """Return an error of the server in the words of this command."""
        if self._section.chat and error.code == "no_chat_template":
            return RunError(
                "the model of the server has no chat template",
                hint="leave out `--chat` to continue texts",
            )
        hint = error.hint
        if self._section.chat and error.code == "context_length_exceeded":
            hint = "`/reset` forgets the messages"
        return RunError(error.what, why=error.why, hint=hint)

    def _keep(self, user: dict[str, str], answer: str) -> None:
        if self._section.chat:
            self._messages += [user, {"role": "assistant", "content": answer}]

    @property
    def _most_tokens(self) -> int | None:
        """Largest number of tokens of an answer; None: the server's."""
        return self._section.tokens or (None if self._section.chat else _TOKENS)

    def _parts(self, user: dict[str, str]) -> Generator[str, None, str | None]:
        section = self._section
        settings = {
            "temperature": section.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k,
            "seed": section.seed,
            "stop": list(section.stop) or None,
            "model": section.model,
            "max_tokens": self._most_tokens,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        if section.chat:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return self._client.chat([*system, *self._messages, user], given)
        return self._client.complete(user["content"], given)


def _key(section: AskSection) -> str | None:
    if section.api_key_file is None:
        return None
    from lmcore_serve.key_file import read_keys

    return read_keys(section.api_key_file)[0]
