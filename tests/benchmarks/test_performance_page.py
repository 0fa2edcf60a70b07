"""Every table of docs/reference/performance.md names the script that prints its rows."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (ROOT / "docs/reference/performance.md").read_text(encoding="utf-8")
SOURCE = re.compile(r"Measured by `benchmarks/(\w+)\.py( [^`]+)?` on (\d{4}-\d\d-\d\d): \S.+\.")
FIELD = "\0"
"""Takes the place of a value in the text of an f-string."""


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        line: Number of its first line.
        source: The line above it.
        labels: First cells of its rows, without remarks in parentheses.
    """

    line: int
    source: str
    labels: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}"


def tables(page: str) -> Iterator[Table]:
    """Yield the tables of a page."""
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if not re.fullmatch(r"\|[-:|]+\|", line):
            continue
        above = next((one for one in reversed(lines[: number - 1]) if one), "")
        labels = []
        for row in lines[number + 1 :]:
            if not row.startswith("|"):
                break
            cell = row.split("|")[1].strip()
            labels.append(re.sub(r" \(.*\)$", "", cell).replace("`", ""))
        yield Table(number, above, tuple(labels))


def printed(script: str, seen: set[str]) -> Iterator[str]:
    """Yield the strings of a script and its imports, without docstrings and help texts."""
    seen.add(script)
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text(encoding="utf-8"))
    skipped = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    skipped |= {
        id(one.value)
        for one in ast.walk(tree)
        if isinstance(one, ast.keyword) and one.arg == "help"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else FIELD for one in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skipped:
                yield node.value.strip()
        elif isinstance(node, ast.ImportFrom) and node.module:
            if (BENCHMARKS / f"{node.module}.py").exists():
                if node.module not in seen:
                    yield from printed(node.module, seen)
            elif node.module.partition(".")[0] in {"lmcore", "lmcore_data_tools"}:
                yield from constants(node.module, {one.name for one in node.names})


def constants(module: str, names: set[str]) -> Iterator[str]:
    """Yield the strings in constants of lmcore: rows may have the names of a table of it."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not module.startswith("lmcore."):
        path = ROOT / "plugins/data-tools/src" / path.relative_to(ROOT)
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in names:
            strings = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
            yield from (one for one in strings if isinstance(one, str))


def is_printed(label: str, strings: set[str]) -> bool:
    """Return whether a label is one of a script's strings, or in an f-string of it.

    A value of an f-string is a number in the label, or another string of the script.
    """
    if label in strings:
        return True
    digits = re.escape(re.sub(r"\d+", FIELD, label))
    for text in strings:
        if FIELD not in text or not re.search("[a-z]{3}", text):
            continue
        words = re.sub(r"\d+", FIELD, text)
        if re.search("[a-z]{3}", label) and re.search(rf"(?<!\w){digits}(?!\w)", words):
            return True
        found = re.fullmatch("(.+)".join(map(re.escape, text.split(FIELD))), label)
        if found and all(one in strings for one in found.groups()):
            return True
    return False


class Parsed(Exception):  # noqa: N818  # is no error
    """The options are right."""


@pytest.fixture
def problem(importable, monkeypatch, capsys):
    """Return a function that says what is wrong with a table; "" if nothing is."""

    def parse(parser: ArgumentParser, **_: object) -> Namespace:
        parser.parse_args()
        raise Parsed

    def found(table: Table) -> str:
        source = SOURCE.fullmatch(table.source)
        if source is None:
            return "no script"
        script, flags = source[1], shlex.split(source[2] or "")
        assert date.fromisoformat(source[3])
        if not (BENCHMARKS / f"{script}.py").exists():
            return f"no {script}.py"
        module = importlib.import_module(script)
        monkeypatch.setattr(module, "parse", parse)
        monkeypatch.setattr("sys.argv", [script, *flags])
        try:
            module.main()
        except Parsed:
            pass
        except SystemExit:
            return capsys.readouterr().err.splitlines()[-1]
        strings = {*printed(script, set()), *flags}
        return ", ".join(label for label in table.labels if not is_printed(label, strings))

    return found


@pytest.mark.parametrize("table", list(tables(PAGE)), ids=str)
def test_every_row_has_a_script(problem, table):
    """The line above a table names a script that exists, its options, date and machine."""
    assert table.labels
    assert problem(table) == ""


LINE = "Measured by `benchmarks/serve.py --rounds 3` on 2026-11-26: one core."
ROWS = "| | a |\n|---|---|\n| `together` (tokens/s) | 1 |\n| ratio | 2 |\n"


@pytest.mark.parametrize(
    "page, message",
    [
        (f"{LINE}\n\n{ROWS}", ""),
        (ROWS, "no script"),
        (f"{LINE}\n\nA text.\n\n{ROWS}", "no script"),
        (f"{LINE.replace(': one core', '')}\n\n{ROWS}", "no script"),
        (f"{LINE.replace('serve', 'surf')}\n\n{ROWS}", "no surf.py"),
        (f"{LINE.replace('--rounds', '--turns')}\n\n{ROWS}", "unrecognized arguments: --turns 3"),
        (f"{LINE.replace('3', 'three')}\n\n{ROWS}", "argument --rounds: invalid int value"),
        (f"{LINE}\n\n{ROWS}| tokens at midnight | 3 |\n", "tokens at midnight"),
        (f"{LINE}\n\n{ROWS}| 7 of 8 | 3 |\n", "7 of 8"),
    ],
)
def test_what_no_script_prints_is_found(problem, page, message):
    """A made-up row, option or script, and a table without a date and machine."""
    (table,) = tables(page)
    found = problem(table)
    assert message in found
    assert bool(message) == bool(found)
