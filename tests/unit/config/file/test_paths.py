"""Paths in the settings of a run that was moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcore.config.file.paths import follow_moved_paths
from lmcore.config.section import run_options
from lmcore.config.settings import Provenance


def follow(now: Path, before: Path | None, **values: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values with the paths followed, and the notices."""
    layer = {name: (value, Provenance("file", "x")) for name, value in values.items()}
    notices = follow_moved_paths(layer, run_options(), before and str(before), now)
    return {name: value for name, (value, _) in layer.items()}, notices


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that was moved from `tmp_path/old` to `tmp_path/new`."""
    new = tmp_path / "new"
    (new / "runs/a/tokenizer").mkdir(parents=True)
    (new / "data").mkdir()
    for name in ("data/text.bin", "data/text.idx", "runs/a/tokenizer/merges.txt"):
        (new / name).touch()
    return new


def test_data_beside_a_moved_run(project: Path, tmp_path: Path) -> None:
    """It is found at the same place relative to the run, and its weight stays."""
    old, new = tmp_path / "old", project
    values, notices = follow(
        new / "runs/a", old / "runs/a", data_path=("0.5", str(old / "data/text")), seed=1
    )
    assert values == {"data_path": ("0.5", str(new / "data/text")), "seed": 1}
    assert notices == [f"`data_path`: `{old / 'data/text'}` is gone; `{new / 'data/text'}` is used"]


def test_what_is_not_gone_stays(project: Path, tmp_path: Path) -> None:
    """A copied run keeps the data at its place; a path that is nowhere stays for the error."""
    (tmp_path / "old/data").mkdir(parents=True)
    (tmp_path / "old/data/text.bin").touch()
    paths = (str(tmp_path / "old/data/text"), str(tmp_path / "old/other"), "relative")
    for before in (tmp_path / "old/runs/a", project / "runs/a", None):
        values, notices = follow(project / "runs/a", before, data_path=paths)
        assert values == {"data_path": paths}
        assert notices == []


def test_a_tokenizer_that_is_gone(project: Path, tmp_path: Path) -> None:
    """The run's own copy has the files."""
    gone = {"vocab_file": "/gone/vocab.json", "merge_file": "/gone/gpt2-merges.txt"}
    values, notices = follow(project / "runs/a", None, **gone)
    merges = str(project / "runs/a/tokenizer/merges.txt")
    assert values == {"vocab_file": "/gone/vocab.json", "merge_file": merges}
    assert len(notices) == 1


def test_a_path_to_write_to(project: Path, tmp_path: Path) -> None:
    """A cache that was moved is used; what does not exist yet follows from the run directory."""
    old, new = tmp_path / "old", project
    (new / "cache").mkdir()
    paths = {
        "data_cache_path": str(old / "cache"),
        "kill_switch_path": str(old / "runs/a/stop"),
        "tensorboard_dir": str(old / "events"),
    }
    values, notices = follow(new / "runs/a", old / "runs/a", **paths)
    followed = {
        "data_cache_path": str(new / "cache"),
        "kill_switch_path": str(new / "runs/a/stop"),
    }
    assert values == paths | followed
    assert len(notices) == 2
    (old / "cache").mkdir(parents=True)
    values, _ = follow(new / "runs/a", old / "runs/a", **paths)
    assert values["data_cache_path"] == paths["data_cache_path"], "it is still there"


def test_named_paths(project: Path, tmp_path: Path) -> None:
    """Of `NAME=PATH` the path is found; names of texts and of tasks are no paths."""
    old, new = tmp_path / "old", project
    (new / "data/mine.py").touch()
    values, _ = follow(
        new / "runs/a",
        old / "runs/a",
        valid_data=("shakespeare", f"web={old}/data/text"),
        eval_tasks=(f"lambada,{old}/data/mine.py", "piqa"),
        eval_tasks_data=(f"{old}/data", f"piqa={old}/data/text.bin"),
    )
    assert values == {
        "valid_data": ("shakespeare", f"web={new}/data/text"),
        "eval_tasks": (f"lambada,{new}/data/mine.py", "piqa"),
        "eval_tasks_data": (f"{new}/data", f"piqa={new}/data/text.bin"),
    }
