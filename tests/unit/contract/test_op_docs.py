"""The reference page of the ops has every op, attribute and trait, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.config.options.help import shown_default
from lmcore.contract import OP_SPECS
from lmcore.contract.op.context import TRAITS, attribute_options

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/ops.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """Return the text below a second-level heading."""
    parts = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert heading in parts, heading
    return parts[heading]


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of a section's table by the word in the first one."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("` "): row[1:] for row in cells}


def test_every_attribute_has_its_row():
    """Flag, default and meaning match the declaration, and the ops match its uses."""
    found = rows("Attributes")
    assert list(found) == list(attribute_options())
    for name, one in attribute_options().items():
        flag, default, meaning, ops = found[name]
        assert flag == f"`{one.flag}`"
        assert default == (shown_default(one) or ("off" if one.default is False else ""))
        assert meaning == one.help
        having = [spec.name for spec in OP_SPECS if name in spec.attributes]
        assert re.findall(r"`(\w+)`", ops) == having


def test_every_trait_has_its_row():
    """A trait means what the core says."""
    assert {name: row[0] for name, row in rows("Traits").items()} == dict(TRAITS)


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_every_op_has_its_attributes_and_gradients(spec):
    """The lines of an op name what its spec names, in the same order."""
    text = section(f"`{spec.name}`")
    (attributes,) = re.findall(r"^- Attributes: (.*)\.$", text, re.MULTILINE)
    assert re.findall(r"`(\w+)`", attributes) == list(spec.attributes)
    (gradients,) = re.findall(r"^- Gradients: (.*)\.$", text, re.MULTILINE)
    assert re.findall(r"`(\w+)`", gradients) == list(spec.gradients)


@pytest.mark.parametrize(
    "word", ["--ops", "--strict-ops", "--deterministic", "`tie`", "`priority`"]
)
def test_the_rules_of_the_choice_are_there(word):
    """The options of a user and the rules of the choice are explained before the list."""
    assert word in section("How a kernel is chosen") + section("Options")
