"""The glossary names what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/glossary.md"
_PLACE = re.compile(r"\[[^\]]+\]\(([^)#]+)\)([^\[|]*)")


def places() -> list[tuple[str, str]]:
    """Return each path in the column of code, with a name that the page says is defined there."""
    found = []
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        if not row.startswith("| ") or row.startswith("| term"):
            continue
        for path, names in _PLACE.findall(row.rsplit(" | ", 1)[1]):
            found += [(path, name) for name in re.findall(r"`(\w+)`", names) or [""]]
    return found


def test_the_page_has_places() -> None:
    assert len(places()) > 40


@pytest.mark.parametrize("path,name", places())
def test_place_exists(path: str, name: str) -> None:
    """The file is there, and defines the name."""
    file = (PAGE.parent / path).resolve()
    assert file.exists()
    if name:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        defined |= {
            node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        }
        assert name in defined
