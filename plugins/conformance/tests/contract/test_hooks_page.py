"""Hooks, and reference pages that list every one of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lmcore import plugin
from lmcore.contract import API_VERSION, OP_SPECS
from lmcore_conformance.contract.snapshot import parse_hook_docstring, specified_hooks
from lmcore_conformance.contract.surface import LOADS_TORCH, PUBLIC_MODULES

DOCS = Path(__file__).resolve().parents[4] / "docs" / "reference"
HOOKS = specified_hooks()
FIELDS = ("Called by", "When", "Ranks", "Return")


def section(page: str, heading: str) -> str:
    """Return the text below a second-level heading; fails if the page has none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## `([^\n]+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert heading in parts, f"docs/reference/{page} has no section `{heading}`"
    return parts[heading]


def test_there_are_hooks():
    """The page of extension points is not empty, and all of them carry the prefix."""
    assert len(HOOKS) >= 13
    assert all(name.startswith("lmcore_") for name in HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_as_its_docstring_says(hook):
    """The reference has its signature, its summary, who calls it, when, where, and its result."""
    signature = inspect.signature(HOOKS[hook])
    text = " ".join(section("hooks.md", f"{hook}({', '.join(signature.parameters)})").split())
    summary, fields = parse_hook_docstring(inspect.getdoc(HOOKS[hook]))
    assert summary in text
    for title in FIELDS:
        assert f"{title}: {fields[title]}" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_is_documented_with_its_type(hook):
    """The reference lists each argument of the hook, and none that is gone."""
    signature = inspect.signature(HOOKS[hook])
    text = section("hooks.md", f"{hook}({', '.join(signature.parameters)})")
    listed = re.findall(r"^- `(\w+)`: `([^`]+)`, \S", text, re.MULTILINE)
    assert listed == [
        (name, parameter.annotation) for name, parameter in signature.parameters.items()
    ]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_in_its_docstring_what_an_author_must_know(hook):
    """Authors read the specification in their editor: four lines, in one order, and no other."""
    text = inspect.getdoc(HOOKS[hook])
    titles = re.findall(r"^([A-Z][a-z]+(?: by)?):", text, re.MULTILINE)
    assert titles == list(FIELDS)
    assert all(parse_hook_docstring(text)[1].values())


def test_the_reference_names_the_version():
    """The page describes the current contract."""
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert f"`lmcore.contract.API_VERSION`, now {API_VERSION}." in text


def test_the_reference_lists_the_public_names():
    """Each public module with its names, and a mark if its import loads torch."""
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(lmcore[\w.]*)`( \*)? \| (.*?) \|", text, re.MULTILINE)
    assert {module: tuple(re.findall(r"`(\w+)`", names)) for module, _, names in rows} == dict(
        PUBLIC_MODULES
    )
    assert {module for module, mark, _ in rows if mark} == LOADS_TORCH


def test_the_reference_has_no_hook_that_is_gone():
    """A removed hook leaves the page too."""
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## `(lmcore_\w+)", text, re.MULTILINE))
    assert headings == set(HOOKS)


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_every_op_is_documented_with_schema_and_tolerances(spec):
    """The reference has summary, schema, gradients and the tolerance of each dtype."""
    text = section("ops.md", spec.name)
    assert spec.summary in text
    assert f"{spec.name}{spec.schema}" in text
    assert f"Gradients: {'yes' if spec.has_backward else 'no'}." in text
    for dtype, tolerance in spec.tolerances.items():
        assert f"{dtype} {tolerance.absolute:g} + {tolerance.relative:g}" in text


def test_the_reference_has_no_op_that_is_gone():
    """A removed op leaves the page too."""
    text = (DOCS / "ops.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `(\w+)`", text, re.MULTILINE) == [spec.name for spec in OP_SPECS]


def test_every_hook_is_called_by_the_core():
    """The plugin package calls each declared hook by its name."""
    folder = Path(inspect.getfile(plugin)).parent
    callers = [path for path in folder.glob("*.py") if not path.name.startswith("check")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in callers)
    assert {name for name in HOOKS if f'"{name}"' not in source} == set()
