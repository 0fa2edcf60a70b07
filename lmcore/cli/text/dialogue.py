"""Dialogue of a command: lines from a terminal or a pipe, answers as they grow, notes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

from lmcore.base.errors import ConfigError, LmcoreError, printable

__all__ = ["LINES_BANNER", "Dialogue"]

LINES_BANNER = "Enter a text; Ctrl-C stops an answer, Ctrl-D ends."
"""First line on a terminal where each line is continued by itself."""

_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"
_LONGEST_LINE = 16 * 1024 * 1024


class Dialogue:
    """Lines of a user and texts for them.

    On a terminal a prompt asks for each line, Ctrl-C at the prompt is no end, and an error is a
    note.  Otherwise nothing but texts is written to the output, and errors and Ctrl-C end the
    command.  A line of white space is skipped.
    """

    def __init__(
        self,
        output: TextIO,
        *,
        prompt: str,
        banner: str = "",
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask nothing yet; a terminal shows the banner.

        Args:
            output: Stream of the texts.
            prompt: Text before the line of the user, without the space after it.
            banner: First line on a terminal.
            waits: Called before each wait for a line of a terminal.
        """
        self._output = output
        self._prompt, self._waits = prompt, waits
        self._begun = False  # a text without the end of its line
        self.interactive = sys.stdin.isatty()
        self._styled = output.isatty()
        if self.interactive and banner:
            self.note(banner)
        if self.interactive and self._styled:
            with contextlib.suppress(ImportError):  # a Python without it has no line editing
                import readline  # noqa: F401 - `input` uses it

    def lines(self, take: Callable[[str], bool]) -> None:
        """Call *take* with each line until it returns False or the lines end.

        Raises:
            ConfigError: A line is not UTF-8, or too long.
        """
        while (line := self._read()) is not None:
            try:
                if line.strip() and not take(line):
                    return
            except LmcoreError as error:
                if not self.interactive:
                    raise
                if self._begun:
                    self.end_text()
                self.note(error.render())

    def write(self, text: str, *, bold: bool = False) -> None:
        """Write a piece of a text."""
        if self._styled:
            text = printable(text)
            text = f"{_BOLD}{text}{_NORMAL}" if bold and text else text
        self._output.write(text)
        self._output.flush()
        self._begun = self._begun or bool(text)

    def end_text(self) -> None:
        """End the line of a text."""
        self._output.write("\n")
        self._output.flush()
        self._begun = False

    def note(self, text: str) -> None:
        """Write a note to standard error."""
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()

    def _read(self) -> str | None:
        """Return the next line; None at the end."""
        if not self.interactive:
            return self._read_pipe()
        while True:
            self._waits()
            try:
                return self._ask()
            except KeyboardInterrupt:
                self.note("\n(Ctrl-D ends)")
            except EOFError:
                self.note("")
                return None
            except UnicodeError:
                self.note("the line is not UTF-8")

    def _ask(self) -> str:
        if self._styled:
            line = input(f"\x01{_BOLD}\x02{self._prompt}\x01{_NORMAL}\x02 ")
            return _decoded(line)
        sys.stderr.write(f"{self._prompt} ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return _decoded(line).removesuffix("\n")

    def _read_pipe(self) -> str | None:
        line = sys.stdin.buffer.readline(_LONGEST_LINE)
        if not line:
            return None
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise ConfigError(f"a line of standard input is longer than {_LONGEST_LINE:,} bytes")
        try:
            return line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise ConfigError("a line of standard input is not UTF-8") from None


def _decoded(line: str) -> str:
    """Return a line of a terminal, whose bytes of UTF-8 the C locale does not decode.

    Raises:
        UnicodeError: It has other bytes.
    """
    return line.encode(errors="surrogateescape").decode()
