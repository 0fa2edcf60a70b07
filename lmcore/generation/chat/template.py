"""`ChatTemplate`: a conversation as the text, and the tokens, that a chat model expects.

    template = ChatTemplate.of(tokenizer)
    ids = template.prompt_tokens([{"role": "user", "content": "Hello"}])

Whatever spells a special token is encoded as that token, in the text of a message too, as with
transformers.  Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.pretrained.chat_files import DEFAULT_TEMPLATE, chat_templates
from lmcore.data.tokenizer.pretrained.special_text import role_tokens, special_encoder
from lmcore.generation.chat.renderer import (
    MAX_TEMPLATE_CHARACTERS,
    ChatRenderer,
    EveryTextError,
    TemplateError,
)

__all__ = ["ChatTemplate", "Message", "TemplateError", "check_template", "read_template"]

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
            f"cannot read the chat template `{path}`", why=error.strerror or str(error)
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
