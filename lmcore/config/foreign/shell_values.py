"""`Variables`: values of a shell script's variables, and texts in which they are replaced.

Followed are `$NAME`, `${NAME}`, arrays, defaults (`${NAME:-x}`), patterns (`${NAME%.bin}`) and
arithmetic of whole numbers.  What a command would print, and a variable without a value, stay as
they are written and are noted.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lmcore.base.errors import ConfigError, suggestion

__all__ = ["SPACE", "Variables", "shell_line", "substitution_end"]

SPACE = "\N{NO-BREAK SPACE}"
"""Sign in place of a space in what is not known, so that it remains one word."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = "@*#?$!-0123456789"
_DEFAULT_QUOTES = re.compile(r"""(?<!\\)(?:'[^']*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
_INDEX = re.compile(r"\[(@|\*|\d+)\]")
_OPERATORS: Mapping[type, Callable[[int, int], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Variables:
    """Values of variables while a script is read.

    Attributes:
        unknown: Texts that only a run of the script would replace, in order.
        read: Names of the variables whose values the script uses.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        """Take the values that count whatever the script sets, and the home directory.

        Args:
            given: Values by name.
        """
        home = {"HOME": os.path.expanduser("~")}  # noqa: PTH111 - no error without one
        self._values = {name: [value] for name, value in {**home, **given}.items()}
        self._fixed = frozenset(given)
        self._named: dict[str, None] = {}  # variables of the script, in order
        self.unknown: list[str] = []
        self.read: set[str] = set()

    def check_given(self, names: Collection[str] = ()) -> None:
        """Check, after the script was read, that it has a variable of each name given.

        Args:
            names: Further variables of the script.

        Raises:
            ConfigError: It has none.
        """
        known = [*self._named, *names]
        for name in sorted(self._fixed - {*known}):
            raise ConfigError(
                f"`--set {name}={self._values[name][0]}`: the script has no variable `{name}`",
                hint=suggestion(name, known) if known else "leave it out",
            )

    def set(self, name: str, values: list[str], *, add: bool = False) -> None:
        """Set a variable, or an array.

        Args:
            name: Name of the variable.
            values: Its values; one, if it is no array.
            add: True to add them to its earlier values.
        """
        self._named[name] = None
        if name in self._fixed:
            return
        before = self._values.get(name, [])
        if not add:
            self._values[name] = values
        elif len(before) <= 1 and len(values) == 1:
            self._values[name] = ["".join(before) + values[0]]
        else:
            self._values[name] = [*before, *values]

    def has(self, name: str) -> bool:
        """Return True if a variable has a value that is not given from outside."""
        return name in self._values and name not in self._fixed

    def forget(self, name: str) -> None:
        """Take the value of a variable away, such as a variable of a loop."""
        self._named[name] = None
        if name not in self._fixed:
            self._values.pop(name, None)

    def mark_unknown(self, text: str) -> str:
        """Note a value that is not known; return it as one word."""
        written = text.replace(SPACE, " ")
        if written not in self.unknown:
            self.unknown.append(written)
        return re.sub(r"\s+", SPACE, text)

    def expanded(self, text: str, *, quoted: bool) -> list[str]:
        """Return a text with its variables replaced; several parts, if it has an array.

        Args:
            text: The text.
            quoted: True in double quotes, where a backslash keeps the sign after it.
        """
        parts, at = [""], 0
        while at < len(text):
            char, end = text[at], at + 1
            if quoted and char == "\\" and text[end : end + 1] in {'"', "\\", "$", "`", "\n"}:
                parts[-1] += text[end].replace("\n", "")
                end += 1
            elif char in {"$", "`"}:
                end = substitution_end(text, at)
                first, *more = self._value(text[at:end], quoted=quoted) or [""]
                parts[-1] += first
                parts += more
            else:
                parts[-1] += char
            at = end
        return parts

    def _value(self, written: str, *, quoted: bool) -> list[str]:
        """Return the values of what begins with `$` or a backquote; itself, if it has none."""
        found: list[str] | None = None
        if written == "$":
            return ["$"]
        if written in {"$@", "$*", "${@}", "${*}"}:
            self.mark_unknown(written)
            return [""]
        if written.startswith("$(("):
            found = self._arithmetic(written[3:-2])
        elif not written.startswith(("`", "$(")):
            inner = written[2:-1] if written.startswith("${") else written[1:]
            found = self._parameter(inner, quoted=quoted)
        return [self.mark_unknown(written)] if found is None else found

    def _parameter(self, inner: str, *, quoted: bool) -> list[str] | None:
        """Return the values of `${inner}`; None if it has none, or the form is not known."""
        count = inner.startswith("#")
        held = _NAME.match(inner, int(count))
        if held is None:
            return None
        self._named[held.group()] = None
        self.read.add(held.group())
        values, rest = self._values.get(held.group()), inner[held.end() :]
        if count:
            return None if values is None else [str(len(values))]
        index = _INDEX.match(rest)
        if index is not None:
            rest = rest[index.end() :]
        if values is not None and (index is None or index.group(1).isdigit()):
            values = values[int(index.group(1)) if index else 0 :][:1]
        default = re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if default is not None:
            return self._or_default(held.group(), values, default, quoted=quoted)
        if values is None or not rest:
            return values
        return _cut(values, "".join(self._unquoted(rest, quoted=False)))

    def _or_default(
        self, name: str, values: list[str] | None, default: re.Match[str], *, quoted: bool
    ) -> list[str] | None:
        colon, sign, text = default.groups()
        empty = not values or (colon == ":" and values == [""])
        if sign == "+":
            return [""] if empty else self._unquoted(text, quoted=quoted)
        if not empty or sign == "?":
            return values
        found = self._unquoted(text, quoted=quoted)
        if sign == "=":
            self.set(name, found)
        return found

    def _unquoted(self, text: str, *, quoted: bool) -> list[str]:
        """Return the text of a default, or of a pattern, without its own quotes.

        Args:
            text: The text.
            quoted: True in double quotes, where single quotes mean themselves.
        """
        parts, at = [""], 0
        for held in _DEFAULT_QUOTES.finditer(text):
            single = held.group()[0] == "'"
            if single and quoted:
                continue
            first, *more = self.expanded(text[at : held.start()], quoted=True)
            parts[-1] += first
            parts += more
            inner = held.group()[1:-1]
            first, *more = [inner] if single else self.expanded(inner, quoted=True)
            parts[-1] += first
            parts += more
            at = held.end()
        first, *more = self.expanded(text[at:], quoted=True)
        parts[-1] += first
        return parts + more

    def _arithmetic(self, text: str) -> list[str] | None:
        """Return the result of whole numbers with `+ - * / %`; None if a value is missing."""

        def value(held: re.Match[str]) -> str:
            self._named[held.group(1)] = None
            return "".join(self._values.get(held.group(1), [held.group(1)])[:1])

        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, text).strip().replace("/", "//")
        try:
            return [str(_computed(ast.parse(text, mode="eval").body))]
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def shell_line(words: Sequence[str], unknown: Sequence[str]) -> str:
    """Return words as a line for a shell, which replaces what is not known yet.

    Args:
        words: Words of a command.
        unknown: Texts that a shell replaces, such as `$RANK` and `$(hostname)`.
    """
    marks = sorted((one for one in unknown if one.startswith(("$", "`"))), key=len, reverse=True)
    if not marks:
        return shlex.join(words)
    places = re.compile(f"({'|'.join(map(re.escape, marks))})")

    def quoted(word: str) -> str:
        parts = places.split(word)  # every second one is replaced
        parts[::2] = [re.sub(r'(["\\$`])', r"\\\1", part) for part in parts[::2]]
        return f'"{"".join(parts)}"' if len(parts) > 1 else shlex.quote(word)

    return " ".join(map(quoted, words))


def substitution_end(text: str, begin: int) -> int:
    """Return the place after what begins with `$` or a backquote.

    Args:
        text: Text of the script.
        begin: Place of the `$` or the backquote.

    Raises:
        ConfigError: It does not end.
    """
    opening = text[begin : begin + 2]
    if text[begin] == "`":
        end = text.find("`", begin + 1)
        if end >= 0:
            return end + 1
    elif opening not in {"$(", "${"}:
        held = _NAME.match(text, begin + 1)
        return held.end() if held else begin + 1 + (text[begin + 1 : begin + 2] in {*_SPECIAL})
    else:
        close = ")" if opening == "$(" else "}"
        depth = 0
        for place in range(begin + 1, len(text)):
            depth += (text[place] == opening[1]) - (text[place] == close)
            if depth == 0:
                return place + 1
    raise ConfigError(
        f"`{text[begin : begin + 20].splitlines()[0]}` in the script does not end",
        hint="give the script as it runs, or the command line alone",
    )


def _computed(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError


def _cut(values: list[str], rest: str) -> list[str] | None:
    """Return values without what a pattern of `%`, `%%`, `#` or `##` matches."""
    held = re.fullmatch(r"(%%?|##?)(.*)", rest, re.DOTALL)
    return None if held is None else [_without(one, *held.groups()) for one in values]


def _without(text: str, sign: str, pattern: str) -> str:
    places = list(_cuts(text, sign, pattern))
    if not places:
        return text
    longest = len(sign) == 2
    if sign[0] == "%":
        return text[: min(places) if longest else max(places)]
    return text[max(places) if longest else min(places) :]


def _cuts(text: str, sign: str, pattern: str) -> Iterator[int]:
    """Yield the places where the end (or, for `#`, the beginning) matches a pattern."""
    for place in range(len(text) + 1):
        if fnmatch.fnmatchcase(text[place:] if sign[0] == "%" else text[:place], pattern):
            yield place
