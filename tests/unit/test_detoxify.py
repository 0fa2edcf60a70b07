"""`examples/detoxify/recipe.py`: how it reads prompts, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from lmcore.generation.prompt import read_prompt_lines

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
