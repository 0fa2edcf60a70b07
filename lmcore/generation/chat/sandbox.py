"""Rendering of chat templates by jinja2's sandbox; the program of the process of `ChatRenderer`.

Templates come with checkpoints of unknown authors.  The sandbox keeps them from Python's internals;
the limits of the process bound their memory and time, which the sandbox does not.  Filters,
functions, tags and line breaks are as in transformers, for which templates are written.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lmcore.generation.chat.json_messages import read_message, write_message

__all__ = ["TemplateRefusalError", "render", "serve"]


class TemplateRefusalError(TemplateError):
    """The error of a template that calls `raise_exception`."""


class _Generation(Extension):
    """Tag `{% generation %}`, which marks the model's text for training and adds nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Namespace without names that begin with an underscore, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} begins with an underscore")


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may give it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON as it is; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - templates expect the local time


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _now,
    }
    return environment.from_string(template)


def render(template: str, variables: Mapping[str, Any], *, longest: int) -> str:
    """Return the text of a template.

    Args:
        template: Source of the template.
        variables: Variables of the template, JSON values.
        longest: Largest number of characters of the text.

    Raises:
        TemplateError: The template is wrong, refuses the variables, or writes too much.
    """
    pieces, length = [], 0
    for piece in _compiled(template).generate(variables):
        length += len(piece)
        if length > longest:
            raise TemplateError(f"its text is longer than {longest:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of a request under `text`, or the problem and its message."""
    try:
        return {
            "text": render(request["template"], request["variables"], longest=request["longest"])
        }
    except TemplateRefusalError as error:
        return {"problem": "refusal", "message": str(error)}
    except TemplateSyntaxError as error:
        return {"problem": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"problem": "memory", "message": ""}
    except Exception as error:  # noqa: BLE001 - any error of the template's expressions
        return {"problem": "error", "message": f"{type(error).__name__}: {error}"[:2000]}


def serve(source: IO[bytes], sink: IO[bytes], memory: int) -> int:
    """Answer requests until *source* ends, and return the exit status.

    Args:
        source: Standard input of the process.
        sink: Standard output of the process.
        memory: Largest address space of the process in bytes.
    """
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    write_message(sink, {"ready": True})
    while (request := read_message(source)) is not None:
        # SIGPROF ends the process when it has computed for so long.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        write_message(sink, _answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0
