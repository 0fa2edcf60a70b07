"""The tables of what has run: each claim of a device's page has evidence, and its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"cuda": "plugins_cuda", "xpu": "plugins_xpu"}
"""Page of `docs/reference`, and the folder of its plugin."""

HEADING = "## What has run, and what has not"
KINDS = (
    "run on hardware",
    "run on the real package on a CPU",
    "run against a stand-in",
    "arithmetic on a published page",
    "not run",
)


def table(name: str) -> tuple[str, str, list[list[str]]]:
    """Return the text before a page's table, that around it, and the cells of its rows."""
    page = (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")
    before, found, text = page.partition(HEADING)
    assert found
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| section | claim | evidence | what ran |"
    return before, text, [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("name", PAGES)
def test_every_claim_has_one_kind_of_evidence(name: str) -> None:
    """The kinds are explained above the table; what has run says by what."""
    _, text, rows = table(name)
    assert tuple(re.findall(r"^- \*\*([^*]+)\*\*:", text, re.MULTILINE)) == KINDS
    for row in rows:
        _, claim, evidence, ran = row
        assert claim
        assert evidence in KINDS, row
        assert ran or evidence == "not run", row


@pytest.mark.parametrize("name", PAGES)
def test_every_section_has_a_claim(name: str) -> None:
    """A new section of the page needs its rows, in the page's order."""
    before, _, rows = table(name)
    sections = re.findall(r"^## (.+)$", before, re.MULTILINE)
    linked = [match[1] for row in rows if (match := re.match(r"\[(.+)\]\(#", row[0]))]
    assert [section for section in linked if section in sections] == sections


@pytest.mark.parametrize("name", PAGES)
def test_the_tests_of_a_claim_exist(name: str) -> None:
    """Under the names in the table; stand-ins are named by their kind."""
    _, text, rows = table(name)
    tests = ROOT / PAGES[name] / "tests"
    named = {file for row in rows for file in re.findall(r"`(test_\w+\.py)`", row[3])}
    assert named
    assert [file for file in sorted(named) if not (tests / file).is_file()] == []
    elsewhere = [path for row in rows for path in re.findall(r"`([\w/]+/test_\w+\.py)`", row[3])]
    assert [path for path in elsewhere if not (ROOT / path).is_file()] == []
    kinds = re.findall(r"\*([\w. ]+)\*", text.partition("**run against a stand-in**")[2])
    for _, claim, evidence, ran in rows:
        if evidence == "run against a stand-in":
            assert any(kind in ran for kind in kinds), claim


@pytest.mark.parametrize("name", PAGES)
def test_no_claim_has_run_on_hardware(name: str) -> None:
    """The pages and the README say so; the first report of a GPU changes all three."""
    _, text, rows = table(name)
    assert not [claim for _, claim, evidence, _ in rows if evidence == "run on hardware"]
    assert re.search(r"No part of `lmcore-\w+` has run on an? (Intel )?GPU", text)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "have [not run on a GPU yet]" in readme
