"""`examples/detoxify/recipe.py`: how it reads prompts, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from lmcore.generation.text.prompt import read_prompt_lines

FOLDER = Path(__file__).parents[2] / "examples/detoxify"
SCORER = f"{FOLDER / 'word_scorer.py'}:score"


@pytest.fixture
def recipe() -> ModuleType:
    """The module, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("recipe", FOLDER / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_samples(path: Path, texts: Sequence[str]) -> str:
    """Write texts as `lmcore generate --sample-output-file` does."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize(
    "content", ["a\u2028b\x0cc\nd", "a\r\nb\n", "a\n\n", "a\x85b\n\nc", "\n", "a\rb\n"]
)
def test_prompts_are_those_of_the_command(recipe: ModuleType, tmp_path: Path, content: str) -> None:
    """A line ends where it ends for the command that continued it."""
    file = tmp_path / "prompts"
    file.write_bytes(content.encode())
    assert recipe.read_prompts(file) == read_prompt_lines(str(file))


@pytest.mark.parametrize(
    "texts, share, problem",
    [([], "0.5", "no texts"), (["", " \n"], "0.5", "only empty"), (["a"], "0", "--share 0")],
)
def test_nothing_to_select(
    recipe: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    share: str,
    problem: str,
) -> None:
    """The error says what is missing."""
    samples = write_samples(tmp_path / "samples", texts)
    argv = ["recipe.py", "select", samples, str(tmp_path / "selected"), "--share", share]
    monkeypatch.setattr(sys, "argv", [*argv, "--scorer", SCORER])
    with pytest.raises(SystemExit, match=problem):
        recipe.main()


@pytest.mark.parametrize(
    "scorer, problem",
    [
        ("nope.py:score", "there is no file `nope.py`"),
        (f"{FOLDER / 'word_scorer.py'}:nope", "has no function `nope`"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("word_scorer.py", "is not FILE.py:FUNCTION"),
        (":score", "is not FILE.py:FUNCTION"),
    ],
    ids=["file", "function", "module", "no-function", "no-place"],
)
def test_wrong_scorers(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, scorer: str, problem: str
) -> None:
    """A scorer is checked before there are texts, and the error says what is wrong."""
    monkeypatch.setattr(sys, "argv", ["recipe.py", "check", "--scorer", scorer])
    with pytest.raises(SystemExit, match=problem):
        recipe.main()
    monkeypatch.setattr(sys, "argv", ["recipe.py", "check", "--scorer", SCORER])
    recipe.main()


@pytest.mark.parametrize(
    "scores, problem",
    [
        ([0.5, 2.0], "returned 2, which is not from 0 to 1, for 'b'"),
        ([0.5, float("nan")], "returned nan"),
        ([0.5], "returned 1 scores for 2 texts"),
    ],
    ids=["range", "nan", "number"],
)
def test_wrong_scores(recipe: ModuleType, scores: list[float], problem: str) -> None:
    """The error has the score and its text, or the numbers of both."""
    with pytest.raises(SystemExit, match=problem):
        recipe.scores_of(["a", "b"], lambda _texts: scores)


@pytest.mark.parametrize(
    "iters, scorer, existing, problem",
    [
        ("x", SCORER, None, "not `x`"),
        ("5", "nope.py:score", None, "nope.py"),
        ("5", SCORER, "run", "`run` exists"),
        ("5", SCORER, "run-data", "`run-data` exists"),
    ],
    ids=["iters", "scorer", "run", "data"],
)
def test_the_script_checks_first(
    tmp_path: Path, iters: str, scorer: str, existing: str | None, problem: str
) -> None:
    """Nothing is written before what the user gave is checked."""
    if existing is not None:
        (tmp_path / existing).mkdir()
    done = subprocess.run(
        ["bash", str(FOLDER.with_suffix(".sh")), "run"],
        cwd=tmp_path,
        env={**os.environ, "ITERS": iters, "SCORER": scorer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ([] if existing is None else [existing])
