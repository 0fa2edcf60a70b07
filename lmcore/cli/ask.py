"""`lmcore ask`: ask a server for text, from a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_with_plugins
from lmcore.errors import ConfigError, RunError, printable
from lmcore.generation.sampling_options import MAX_TEMPERATURE, MAX_TOP_K
from lmcore.serving.client import Client, ClientError

__all__ = ["SUMMARY", "AskSection", "run"]

SUMMARY = "Ask a server of `lmcore serve`, or of Megatron-LM, for text."

_EPILOG = """\
  lmcore ask localhost:5000
  echo 'Once upon a time' | lmcore ask localhost:5000 --tokens 50
  lmcore ask localhost:5000 --chat"""


@dataclass(frozen=True)
class AskSection:
    """Ask a server of `lmcore serve`, or of Megatron-LM, for text."""

    address: str = option(REQUIRED, "Server, such as localhost:5000 or https://HOST/PATH.")
    prompt: str | None = option(
        None,
        "Text to continue; default: each line of standard input, or of a terminal.",
        may_be_empty=True,
    )
    tokens: int | None = option(None, "Most tokens of an answer; default: 64.", minimum=1)
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
    seed: int | None = option(None, "Seed of the random numbers; default: any.", minimum=0)
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
    client = Client(section.address, _key(section), section.timeout)
    talk = _Talk(section, client)
    if section.prompt is not None:
        talk.answer(section.prompt)
        return 0
    interactive = sys.stdin.isatty()
    for line in _lines(interactive=interactive):
        if section.chat and line == "/exit":
            break
        try:
            talk.take(line)
        except KeyboardInterrupt:
            if not interactive:
                raise
            sys.stdout.write("\n")
        except RunError as error:
            if not interactive:
                raise
            sys.stderr.write(f"{error.render()}\n")
    return 0


class _Talk:
    """Prompts and answers of one command."""

    def __init__(self, section: AskSection, client: Client) -> None:
        self._section, self._client = section, client
        self._messages: list[dict[str, str]] = []
        if section.system_prompt is not None:
            self._messages.append({"role": "system", "content": section.system_prompt})

    def take(self, line: str) -> None:
        """Answer a line; in a conversation do a command, as `lmcore generate --chat` does."""
        if not self._section.chat or not line.startswith("/"):
            self.answer(line)
        elif line.startswith("//"):
            self.answer(line[1:])
        elif line == "/reset":
            self._messages = [one for one in self._messages if one["role"] == "system"]
        else:
            raise RunError(
                f"`{line[:100]}` is no command",
                hint="`/reset` forgets the messages, `/exit` ends, `//TEXT` sends /TEXT",
            )

    def answer(self, text: str) -> None:
        """Print the answer to a text as it arrives.

        A conversation keeps both if the answer is complete, or was interrupted after its begin.
        """
        answer = ""
        user = {"role": "user", "content": text}
        terminal = sys.stdout.isatty()
        try:
            for part in self._parts(user):
                answer += part
                sys.stdout.write(printable(part) if terminal else part)
                sys.stdout.flush()
        except ClientError as error:
            hint = error.hint
            if self._section.chat and error.code == "context_length_exceeded":
                hint = "`/reset` forgets the messages"
            raise RunError(error.what, why=error.why, hint=hint) from None
        except KeyboardInterrupt:
            if answer:
                self._keep(user, answer)
            raise
        self._keep(user, answer)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _keep(self, user: dict[str, str], answer: str) -> None:
        if self._section.chat:
            self._messages += [user, {"role": "assistant", "content": answer}]

    def _parts(self, user: dict[str, str]) -> Iterator[str]:
        section = self._section
        settings = {
            "temperature": section.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k,
            "seed": section.seed,
            "stop": list(section.stop) or None,
            "model": section.model,
            "max_tokens": section.tokens or (None if section.chat else 64),
        }
        given = {name: value for name, value in settings.items() if value is not None}
        if section.chat:
            return self._client.chat([*self._messages, user], given)
        return self._client.complete(user["content"], given)


def _lines(*, interactive: bool) -> Iterator[str]:
    """Return each line of standard input; a terminal is asked for them."""
    if not interactive:
        for raw in sys.stdin.buffer:
            try:
                yield raw.decode().removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise ConfigError("standard input is not UTF-8") from None
        return
    import readline  # noqa: F401 - edits the line, and keeps the earlier ones

    sys.stderr.write("Enter a text; Ctrl-C stops an answer, Ctrl-D ends.\n")
    while True:
        try:
            line = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        if line:
            yield line


def _key(section: AskSection) -> str | None:
    if section.api_key_file is None:
        return None
    from lmcore.serving.key_file import read_keys

    return read_keys(section.api_key_file)[0]
