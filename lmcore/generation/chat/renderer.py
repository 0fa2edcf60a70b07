"""`ChatRenderer`: a process that renders chat templates within limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from lmcore.base.child_process import ending
from lmcore.base.errors import ConfigError, RunError
from lmcore.generation.chat.json_messages import read_message, write_message

__all__ = ["MAX_TEMPLATE_CHARACTERS", "ChatRenderer", "EveryTextError", "TemplateError"]

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
