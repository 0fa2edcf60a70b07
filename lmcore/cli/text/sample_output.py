"""Outputs of generated samples: a terminal as they grow, plain text, JSON lines, or a file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import ConfigError, RunError, printable
from lmcore.generation.text.sample import Sample

__all__ = [
    "JsonOutput",
    "LinesOutput",
    "PlainOutput",
    "check_output_file",
    "open_output_file",
    "standard_output",
]

_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


class _Whole:
    """An output that waits for whole samples."""

    streams = False

    def begin(self, prompt: str) -> None:
        """Wait."""

    def piece(self, text: str) -> None:
        """Wait."""


class JsonOutput(_Whole):
    """One JSON object a line: prompt, text, tokens, finished, seed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def end(self, sample: Sample) -> None:
        """Write the object."""
        values: dict[str, Any] = {
            "prompt": sample.prompt,
            "text": sample.text,
            "tokens": list(sample.tokens),
            "finished": sample.finished,
        }
        if sample.seed is not None:
            values["seed"] = sample.seed
        if sample.score is not None:
            values["score"] = sample.score
        if sample.logprobs is not None:
            values["logprobs"] = sample.logprobs
        self.stream.write(json.dumps(values) + "\n")
        self.stream.flush()


class LinesOutput(_Whole):
    """Megatron's sample file: one JSON object a line with the whole text and its token count."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def end(self, sample: Sample) -> None:
        """Write the object."""
        values = {
            "text": sample.whole,
            "length": sample.num_prompt_tokens + len(sample.tokens),
            "finished": sample.finished,
        }
        self.stream.write(json.dumps(values) + "\n")


class PlainOutput:
    """Text for readers; on a terminal a single sample appears as it grows, its prompt in bold."""

    def __init__(self, stream: TextIO, *, num_samples: int) -> None:
        self.stream = stream
        self.num_samples = num_samples
        self.terminal = stream.isatty()
        self.streams = self.terminal and num_samples == 1
        self._count = 0

    def begin(self, prompt: str) -> None:
        """Show the prompt."""
        self._write(self._prompt(prompt))

    def piece(self, text: str) -> None:
        """Show some more text."""
        self._write(self._shown(text))

    def end(self, sample: Sample) -> None:
        """Show the sample, or end it where it was seen growing."""
        self._count += 1
        if self.streams:
            self._write("\n")
            return
        head = ""
        if self.num_samples > 1:
            gap = "\n" if self._count > 1 else ""
            seed = "" if sample.seed is None else f", seed {sample.seed}"
            head = f"{gap}--- sample {self._count} of {self.num_samples}{seed}\n"
        self._write(head + self._prompt(sample.shown_prompt) + self._shown(sample.text) + "\n")

    def _prompt(self, prompt: str) -> str:
        shown = self._shown(prompt)
        return f"{_BOLD}{shown}{_NORMAL}" if self.terminal and shown else shown

    def _shown(self, text: str) -> str:
        return printable(text) if self.terminal else text

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def check_output_file(path: Path, flag: str = "--sample-output-file") -> None:
    """Raise `ConfigError` where *path* cannot become a file; costs nothing and comes first."""
    if path.is_dir():
        raise ConfigError(f"`{flag} {path}` is a directory", hint="name a file")
    if not path.parent.is_dir():
        raise ConfigError(
            f"`{flag} {path}`: no such directory: `{path.parent}`",
            hint=f"run `mkdir -p {path.parent}`",
        )


@contextmanager
def open_output_file(path: Path) -> Iterator[TextIO]:
    """Open *path* for writing; it appears, or is replaced, when everything was written.

    Raises:
        RunError: The file cannot be written, such as on a full disk.
    """
    try:
        with AtomicFile(path) as file:
            stream = io.TextIOWrapper(file, encoding="utf-8")
            yield stream
            stream.detach()
    except OSError as error:
        raise RunError(f"cannot write `{path}`", why=error.strerror or str(error)) from error


def standard_output() -> TextIO:
    """Return standard output; a character that its encoding lacks is shown as `?`."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout
