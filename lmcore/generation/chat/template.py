"""`ChatTemplate`: a conversation as the text, and the tokens, that a chat model expects.

    template = ChatTemplate.of(tokenizer)
    ids = template.prompt_tokens([{"role": "user", "content": "Hello"}])

Whatever spells a special token is encoded as that token, in the text of a message too, as with
transformers.  Torch-free.

`ChatRenderer`: a process that renders chat templates within limits of time and memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.child_process import ending
from lmcore.base.errors import ConfigError, RunError
from lmcore.base.missing_path import missing_path_hint
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.pretrained.chat_files import DEFAULT_TEMPLATE, chat_templates
from lmcore.data.tokenizer.pretrained.special_text import role_tokens, special_encoder
from lmcore.generation.chat.json_messages import read_message, write_message

__all__ = [
    "MAX_TEMPLATE_CHARACTERS",
    "ChatRenderer",
    "ChatTemplate",
    "EveryTextError",
    "Message",
    "TemplateError",
    "check_template",
    "read_template",
]

MAX_TEMPLATE_CHARACTERS = 1024 * 1024
_MAX_TEXT_CHARACTERS = 16 * 1024 * 1024
_MEMORY = 1024 * 1024 * 1024
_SECONDS = 10.0
_BOOTSTRAP = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = [*given, *(path for path in sys.path if path not in given)]
from lmcore.generation.chat.sandbox import serve
raise SystemExit(serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2])))
"""
"""Program of the process: it searches modules in the same folders as its parent."""


class TemplateError(ConfigError):
    """A template that fails, where one that refuses its messages works."""


class EveryTextError(TemplateError):
    """A template that is wrong, or needs too much, whatever the messages are."""


class ChatRenderer:
    """Rendering of templates in a separate process, which the first one starts.

    Threads may share it: they wait for each other.
    """

    def __init__(self, *, seconds: float = _SECONDS) -> None:
        """Start nothing yet.

        Args:
            seconds: Longest time that a template may compute, in seconds of a processor.
        """
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any], *, name: str) -> str:
        """Return the text of a template.

        Args:
            template: Source of the template.
            variables: Variables of the template, JSON values.
            name: Name of the template's source, for messages.

        Raises:
            TemplateError: The template is wrong, or needs too much time or memory.
            ConfigError: The template refuses the variables, or one of them is no JSON value.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise EveryTextError(
                f"the chat template of `{name}` is too large",
                why=f"it has {len(template):,} characters; {MAX_TEMPLATE_CHARACTERS:,} are allowed",
            )
        request = {
            "template": template,
            "variables": dict(variables),
            "longest": _MAX_TEXT_CHARACTERS,
            "seconds": self._seconds,
        }
        try:
            content = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                "a message or a variable of the chat template is no JSON value", why=str(error)
            ) from None
        with self._lock:
            answer = self._ask(json.loads(content), name)
        if isinstance(answer.get("text"), str):
            return str(answer["text"])
        raise _problem(answer, name)

    def close(self) -> None:
        """End the process; the next template starts another."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _ask(self, request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # somebody ended it
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the end of the process says why
                write_message(process.stdin, request)
            answer = read_message(process.stdout)
        except BaseException:  # an interrupt would leave an answer that nobody reads
            self.close()
            raise
        if isinstance(answer, dict):
            return answer
        status = process.wait()  # its output has ended
        self.close()
        if status == -signal.SIGPROF:
            return {"problem": "time", "message": f"{self._seconds:g} s"}
        raise TemplateError(f"the chat template of `{name}` failed: its process {ending(status)}")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), str(_MEMORY)]
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the command
        )
        weakref.finalize(self, _end, process)
        self._process = process
        assert process.stdout is not None
        if read_message(process.stdout) is None:
            status = process.wait()
            self.close()
            raise RunError(f"the process of chat templates {ending(status)} at its start")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()


def _problem(answer: Mapping[str, Any], name: str) -> ConfigError:
    message = str(answer.get("message"))
    match answer.get("problem"):
        case "refusal":
            return ConfigError(f"the chat template of `{name}` refuses the messages", why=message)
        case "syntax":
            return EveryTextError(
                f"the chat template of `{name}` is no valid template", why=message
            )
        case "time":
            return EveryTextError(
                f"the chat template of `{name}` does not end", why=f"it computed for {message}"
            )
        case "memory":
            return EveryTextError(
                f"the chat template of `{name}` needs too much memory",
                why=f"it may use {_MEMORY >> 20} MiB",
            )
        case _:
            return TemplateError(f"the chat template of `{name}` fails", why=message)


Message = Mapping[str, Any]
"""A message: `role`, `content`, and what else the template knows, such as `tool_calls`."""

_WITH_TOOLS = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the text before an answer; templates read one of them."""
_MAX_BYTES = 4 * MAX_TEMPLATE_CHARACTERS


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a model.

    Attributes:
        tokenizer: Tokenizer of the model.
        templates: Sources of the templates by name; a single one is `default`.
        name: Name of where they are from, for messages.
        renderer: Process that renders them.
    """

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    name: str
    renderer: ChatRenderer = field(default_factory=ChatRenderer, compare=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat template that is kept with a tokenizer; None if there is none.

        Args:
            tokenizer: Tokenizer of the model.

        Raises:
            DataError: Its files are damaged.
        """
        templates = chat_templates(tokenizer)
        if not templates:
            return None
        return cls(tokenizer, templates, str(Path(tokenizer.files()[0]).parent))

    @classmethod
    def from_file(cls, path: str, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the chat template in a file.

        Args:
            path: File with a jinja2 template.
            tokenizer: Tokenizer of the model.

        Raises:
            ConfigError: The file cannot be read.
        """
        return cls(tokenizer, {DEFAULT_TEMPLATE: read_template(path)}, path)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages in order, each with `role` and `content`.
            add_generation_prompt: True: the beginning of the model's answer follows.
            template: Name of the template; default: `tool_use` if there are tools, or `default`.
            tools: Tools that the model may call, each described by a JSON schema.
            **variables: Further variables of the template; they replace `bos_token` and others.

        Raises:
            TemplateError: The template is wrong, or needs too much time or memory.
            ConfigError: The template refuses the messages, a message is no mapping, or there is
                no such template.
        """
        given: dict[str, Any] = {
            "documents": None,
            **role_tokens(self.tokenizer),
            **variables,
            "messages": [_plain(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._source(template, with_tools=tools is not None)
        return self.renderer.render(source, given, name=self.name)

    def prompt_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of a conversation.

        Special tokens in the text are encoded as such, and none are added: the template writes
        them.

        Args:
            messages: Messages in order, each with `role` and `content`.
            **options: Further arguments of `render`.

        Raises:
            ConfigError: See `render`; or the text is not UTF-8.
            DataError: The text is nothing that the tokenizer can encode.
        """
        text = self.render(messages, **options)
        try:
            return self._encode(text)
        except UnicodeEncodeError:
            raise ConfigError("the messages are not UTF-8") from None

    def close(self) -> None:
        """End the process that renders; the next text starts another."""
        self.renderer.close()

    @functools.cached_property
    def _encode(self) -> Callable[[str], list[int]]:
        return special_encoder(self.tokenizer)

    def _source(self, name: str | None, *, with_tools: bool) -> str:
        if name is None:
            name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self.templates else DEFAULT_TEMPLATE
        if name not in self.templates:
            raise ConfigError(
                f"`{self.name}` has no chat template `{name}`",
                hint=f"its templates are {', '.join(f'`{one}`' for one in sorted(self.templates))}",
            )
        return self.templates[name]


def read_template(path: str) -> str:
    """Return the text of a file with a chat template.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return read_bounded_file(path, _MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the chat template `{path}` is not UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the chat template `{path}`",
            why=error.strerror or str(error),
            hint=missing_path_hint(path),
        ) from None


def check_template(path: str) -> None:
    """Raise for a file with a chat template that can answer no message.

    Raises:
        ConfigError: The file cannot be read, is no template, or needs too much time or memory.
    """
    source, renderer = read_template(path), ChatRenderer()
    given = {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    try:
        renderer.render(source, given, name=path)
    except EveryTextError:
        raise
    except ConfigError:
        return  # it wants other messages, or the tokens of a tokenizer
    finally:
        renderer.close()


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without empty values, its reasoning under the names that templates read."""
    if not isinstance(message, Mapping):
        raise ConfigError("a message of a chat is an object with `role` and `content`")
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain
