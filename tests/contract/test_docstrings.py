"""The lint of docstrings refuses what it should, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite import docstrings


def refused(root: Path, source: str, folder: str = "lmcore") -> list[tuple[int, str]]:
    """Return line and rule of the lint's findings in a file of *source* in a folder."""
    (root / folder).mkdir(parents=True)
    (root / folder / "planted.py").write_text(source, encoding="utf-8")
    return [(found.line, found.rule) for found in docstrings.findings(root)]


def test_docstrings_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert docstrings.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "source, finding",
    [
        ('"""What a run says."""', (1, "begins with a pronoun")),
        ('class A:\n    """Whether it is."""', (2, "begins with a pronoun")),
        ('class A:\n    x: int\n    """How many."""', (3, "begins with a pronoun")),
        ('def f():\n    """Where it is."""', (2, "begins with a pronoun")),
        ('def f():\n    """The size."""', (2, "begins with no verb")),
        ('def f():\n    """Names of files."""', (2, "begins with no verb")),
        ('def f():\n    """`x` squared."""', (2, "begins with no verb")),
        ('"""Names.\n\nThose of a run."""', (3, "says")),
        ('"""Rows of a run that goes on."""', (1, "says")),
        ('"""Rows that are told by a flag."""', (1, "says")),
        ('"""Reader that hears messages."""', (1, "says")),
        ('"""Rows.\n\nOne stands for all."""', (3, "says")),
        ('"""Process of its own."""', (1, "says")),
        ('"""Processes with folders of their\nown."""', (2, "says")),
        ('"""Time of a step, and that of a save."""', (1, "says")),
        ('"""Rows, and those with a name."""', (1, "says")),
        ('"""Rows, and those\nwho read them."""', (2, "says")),
        ('"""Errors and the like."""', (1, "says")),
        ('"""Number of rows; None likewise."""', (1, "says")),
        ('def f():\n    """Fit.\n\n    Args:\n        size: Of the step.\n    """', (5, "says")),
        ('def f():\n    """Fit.\n\n    Returns:\n        Whether it fits.\n    """', (5, "says")),
    ],
)
def test_planted_docstring_is_found(tmp_path: Path, source: str, finding: tuple[int, str]) -> None:
    assert refused(tmp_path, source) == [finding]


@pytest.mark.parametrize(
    "folder",
    [
        *("lmcore/data", "plugins/cpu/src", "plugins/cpu/tests", "plugins_xpu/tests"),
        *("tests/lib", "tests/unit/train", "benchmarks", "docs", "examples"),
    ],
)
def test_folder_is_checked(tmp_path: Path, folder: str) -> None:
    """Docstrings are checked in every folder of sources and of tests, not only in the core."""
    assert refused(tmp_path, '"""Rows, and those of a run."""', folder) == [(1, "says")]


@pytest.mark.parametrize("folder", ["tests/unit", "plugins/cpu/tests"])
def test_verb_is_required_in_tests(tmp_path: Path, folder: str) -> None:
    """Helper functions of tests begin with a verb; tests and fixtures need not."""
    source = '@pytest.fixture\ndef f():\n    """The size."""\ndef test_f():\n    """It is 3."""\n'
    assert refused(tmp_path, source + 'def g():\n    """The size."""', folder) == [
        (7, "begins with no verb")
    ]


@pytest.mark.parametrize(
    "source",
    [
        '"""Rules of a plan, and the stand-ins of its tests."""',
        '"""Process with its own folder, and the rows that offer one."""',
        'def f():\n    """Pass `those of` on, and process what is left."""',
        'class A:\n    @property\n    def f(self):\n        """The size; True if it is known."""',
        'def f():\n    """Fit.\n\n    Args:\n        size: Size of the step, in samples.\n    """',
        'x = "of which"\nprint("What is it?")\n"""Which is no docstring."""',
    ],
)
def test_others_pass(tmp_path: Path, source: str) -> None:
    assert not refused(tmp_path, source)
