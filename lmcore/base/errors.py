"""Errors with a message for the user: the problem, its cause, and the fix.

This is the bottom layer, which imports nothing of lmcore.  `lmcore.cli.main` prints an
`LmcoreError` as a message without a traceback; every other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence

__all__ = [
    "AbsentFileError",
    "CheckpointArgumentError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "HostMemoryError",
    "LmcoreError",
    "MissingPackageError",
    "OtherRankError",
    "PluginError",
    "RunError",
    "begun",
    "counted",
    "did_you_mean",
    "host_memory",
    "nearest",
    "printable",
    "several",
    "suggestion",
    "unreadable",
]

_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_VISIBLE = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")
_WORD = re.compile(r"[^\W_]+")
_LEAST_BEGINNING = 2
"""Number of letters of a beginning for which names are suggested, at least."""
_MOST_BEGUN = 5
"""Number of names that are suggested for a beginning, at most."""


class LmcoreError(Exception):
    """A failure that the user can fix.

    Args:
        what: Statement of the problem: one line, lower case, literals in backticks.
        why: Reason, or the values found; may have several lines.
        hint: Next step for the user.
    """

    exit_status = 1

    def __init__(self, what: str, *, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def render(self) -> str:
        """Return the message as printed on stderr, without a trailing newline."""
        lines = [f"error: {self.what}"]
        if self.why:
            lines.append(_hanging("why: ", self.why))
        if self.hint:
            lines += ["", _hanging("hint: ", self.hint)]
        return printable("\n".join(lines))

    @property
    def what_and_why(self) -> str:
        """The mistake and its reason, without the hint."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def __str__(self) -> str:
        return self.render().removeprefix("error: ")


class ConfigError(LmcoreError):
    """A wrong option, file or combination; every problem found is reported at once."""

    exit_status = 2

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        hint: str | None = None,
        others: Sequence[LmcoreError] = (),
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.others = tuple(others)

    @classmethod
    def collect(cls, problems: Sequence[LmcoreError]) -> ConfigError:
        """Return one error that renders all of *problems*, in order."""
        first, *rest = problems
        return cls(first.what, why=first.why, hint=first.hint, others=rest)

    def render(self) -> str:
        """Return all problems, separated by blank lines."""
        return "\n\n".join([super().render(), *(problem.render() for problem in self.others)])


class AbsentFileError(ConfigError):
    """A setting that names a file to read which this host does not have."""


class DataError(LmcoreError):
    """A text, tokenizer file or indexed dataset that cannot be used."""


class CheckpointError(LmcoreError):
    """A checkpoint that is missing, incomplete, altered or of another shape."""


class CheckpointArgumentError(CheckpointError):
    """A `--load` that names no checkpoint, or settings that do not fit the checkpoint.

    It may lack a part that a run without a certain flag needs, such as the optimizer's state.
    """

    exit_status = 2


class PluginError(LmcoreError):
    """A plugin that cannot be loaded, or that violates its contract."""


class DeviceError(LmcoreError):
    """No device, the wrong device, or a device that cannot be used."""

    exit_status = 2


class HostMemoryError(LmcoreError):
    """A `MemoryError` of Python or numpy: the host has not enough memory."""

    def __init__(self, error: MemoryError) -> None:
        super().__init__(
            "not enough memory on the host",
            why=str(error) or None,
            hint="reduce batch sizes, lengths or numbers of samples, documents and workers",
        )


def host_memory() -> int:
    """Return the physical memory of the host in bytes.

    The system may promise more memory than it has, and end the process when it is used.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class RunError(LmcoreError):
    """A training run that cannot continue."""


class OtherRankError(RunError):
    """A process that stops because another process of the run failed and reports the cause."""


class MissingPackageError(LmcoreError):
    """An optional package that is not installed; the hint is the command that installs it."""

    exit_status = 2

    def __init__(self, package: str, *, needed_for: str, install: str) -> None:
        super().__init__(
            f"{needed_for} needs the package `{package}`, which is not installed",
            hint=f"run `{install}`",
        )
        self.package = package


def _hanging(label: str, text: str) -> str:
    """Return *text* after a label; its further lines are indented by the label's length."""
    first, *rest = text.split("\n")
    indent = " " * len(label)
    return "\n".join([label + first, *(line and indent + line for line in rest)])


def printable(text: str) -> str:
    """Return *text* without control characters, which could command a terminal.

    Paths, keys of files, messages of other processes and generated text may have any bytes.
    """
    return text.translate(_VISIBLE)


def counted(count: float, word: str, plural: str = "") -> str:
    """Return a number and its noun, in the singular for one: `1 file`, `1,000 files`, `0.5 files`.

    Args:
        count: The number.
        word: The noun in the singular.
        plural: The noun in the plural; empty: *word* with an s.
    """
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {word if count == 1 else plural or f'{word}s'}"


def several(names: Sequence[str]) -> str:
    """Return names for a message: the first one, and how many others there are."""
    more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"`{names[0]}`{more}"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that *name* is most likely a slip for; None if none is that similar.

    A choice that differs only by case is taken first.  Otherwise at most a third of the letters
    may have to change, one in a short name; beyond a slip of two letters, that holds for each word
    too: `fp8-interval` is not `log-interval`.  Upper and lower case are equal.
    """
    known = {choice.lower(): choice for choice in reversed(list(choices))}
    name = name.lower()
    if name in known:
        return known[name]
    similar = difflib.get_close_matches(name, known, n=5, cutoff=0.6)
    edits = {choice: _edits(name, choice) for choice in similar}
    close = min(
        (
            choice
            for choice in similar
            if edits[choice] <= _most_edits(name)
            and (edits[choice] <= 2 or _has_words_of(name, choice))
        ),
        key=edits.__getitem__,
        default=None,
    )
    return None if close is None else known[close]


def _most_edits(name: str) -> int:
    """Return the largest number of wrong letters in a slip."""
    return max(1, sum(map(str.isalnum, name)) // 3)


def _has_words_of(name: str, choice: str) -> bool:
    """Return True if each word of *name* is a word of *choice*, or a slip for one."""
    words = _WORD.findall(choice)
    return all(
        any(_edits(word, meant) <= _most_edits(word) for meant in words)
        for word in _WORD.findall(name)
    )


def _edits(first: str, second: str) -> int:
    """Return the number of letters to add, remove, change or swap to turn one word into another.

    Source: optimal string alignment distance, by dynamic programming over prefixes.
    """
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and (a, b) == (second[j - 2], first[i - 2]):
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def unreadable(error: OSError | ValueError) -> str:
    """Return why a file cannot be used: the system's reason, or the byte that is not UTF-8.

    Python's own message repeats the path, with the number of the error; the position of a byte in
    it counts from the block that was decoded.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it has the byte 0x{error.object[error.start]:02x} where UTF-8 has none like it"
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error) or type(error).__name__


def begun(name: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that begin with *name*, sorted; the first ones if there are many."""
    return sorted(choice for choice in choices if choice.startswith(name))[:_MOST_BEGUN]


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question whether one of *names* is meant: "did you mean `a` or `b`?"."""
    *most, last = [f"`{name}`" for name in names]
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return a hint for an unknown *name*: the nearest choices, then all of them (up to 20).

    If no choice is similar as a whole, those are suggested whose first words *name* is, or is a
    slip for: `gtp2` for `gpt2-124m` and `gpt2-345m`.
    """
    known = sorted({*choices})
    close = nearest(name, known)
    names = [close] if close else _begun_by_slip(name, known)
    meant = f"{did_you_mean(names)} " if names else ""
    shown = ", ".join(f"`{choice}`" for choice in known[:20])
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return f"{meant}known: {shown}{more}" if known else f"{meant}none are known"


def _begun_by_slip(name: str, choices: Sequence[str]) -> list[str]:
    """Return the choices whose first words, parted by hyphens, are *name* or a slip away."""
    if len(name) < _LEAST_BEGINNING:
        return []
    if found := begun(name, choices):
        return found
    words = name.count("-") + 1
    beginnings = {choice: "-".join(choice.split("-")[:words]) for choice in choices}
    close = nearest(name, sorted({*beginnings.values()}))
    return [choice for choice, start in beginnings.items() if start == close][:_MOST_BEGUN]
