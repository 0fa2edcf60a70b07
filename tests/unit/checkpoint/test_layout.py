"""Tests of finding a checkpoint, and of the messages when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import find_checkpoint, newest_verified, save_checkpoint, survey
from lmcore.checkpoint.layout import complete_checkpoints, parse_iteration


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of iterations 10 and 20."""
    for iteration in (10, 20):
        state = {"w": torch.full((4,), float(iteration))}
        save_checkpoint(tmp_path / "run" / "checkpoints", iteration, state, {}, model_shape={})
    return tmp_path / "run"


@pytest.mark.parametrize("name", [".", "checkpoints", "checkpoints/iter_0000020"])
def test_three_ways_to_name_it(run: Path, name: str):
    """A run directory, its `checkpoints` and one iteration all lead to the newest checkpoint."""
    assert find_checkpoint(run / name) == run / "checkpoints" / "iter_0000020"


def test_relative_to_the_checkpoint_itself(run: Path, monkeypatch: pytest.MonkeyPatch):
    """Inside a checkpoint, `.` means that checkpoint."""
    monkeypatch.chdir(run / "checkpoints" / "iter_0000010")
    assert find_checkpoint(Path()) == Path()


def test_text_file_is_not_trusted(run: Path):
    """The newest complete directory counts, whatever the text file says."""
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("999\n")
    assert find_checkpoint(run).name == "iter_0000020"


@pytest.mark.parametrize(
    "text, warns",
    [("10\n", True), ("20\n", False), ("999\n", False), ("release", False), ("x" * 99, False)],
)
def test_text_file_that_names_another_checkpoint(run: Path, text: str, warns: bool):
    """A user's edit has no effect, but a warning says so with the path of that checkpoint."""
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(text)
    found = newest_verified(survey(run))
    assert found.manifest.iteration == 20
    warning = found.warning() or ""
    assert ("names step 10" in warning) == warns == ("checkpoints/iter_0000010`" in warning)
    assert newest_verified(survey(run / "checkpoints/iter_0000020")).warning() is None


def test_newest_is_the_one_saved_last(run: Path):
    """After a return to an older checkpoint, the save that followed is the newest."""
    save_checkpoint(run / "checkpoints", 15, {"w": torch.ones(4)}, {}, model_shape={})
    assert find_checkpoint(run).name == "iter_0000015"
    order = [path.name for path, _manifest in complete_checkpoints(run / "checkpoints")]
    assert order == ["iter_0000015", "iter_0000020", "iter_0000010"]


def test_incomplete_newest_is_passed_over(run: Path):
    """A directory that lost a file is passed over for an older complete one."""
    (run / "checkpoints" / "iter_0000020" / "__0_0.distcp").unlink()
    assert find_checkpoint(run).name == "iter_0000010"
    with pytest.raises(CheckpointError, match=r"its file `__0_0\.distcp` is missing"):
        find_checkpoint(run / "checkpoints" / "iter_0000020")


def test_only_incomplete_ones(run: Path):
    """Without a complete checkpoint, each incomplete one is listed with its reason."""
    (run / "checkpoints" / "iter_0000010" / "manifest.json").unlink()
    data = run / "checkpoints" / "iter_0000020" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="no complete checkpoint in") as caught:
        find_checkpoint(run)
    assert "`iter_0000010`: it has no `manifest.json`" in caught.value.why
    assert "`iter_0000020`: its file `__0_0.distcp` has 100 bytes instead of" in caught.value.why


@pytest.mark.parametrize("content", ["mp_rank_00/model_optim_rng.pt", "common.pt"])
def test_checkpoint_of_megatron(tmp_path: Path, content: str):
    """It is not called damaged, and no hint says to copy it again."""
    file = tmp_path / "iter_0000100" / content
    file.parent.mkdir(parents=True)
    file.touch()
    for path in (tmp_path, tmp_path / "iter_0000100"):
        with pytest.raises(CheckpointError, match="checkpoint of lmcore") as caught:
            find_checkpoint(path)
        assert "format of Megatron" in str(caught.value.why)
        assert "copy" not in str(caught.value.hint)


def test_nothing_there(tmp_path: Path):
    """A directory without checkpoints says where was looked."""
    with pytest.raises(CheckpointError, match="no checkpoint in") as caught:
        find_checkpoint(tmp_path)
    assert f"looked for `iter_XXXXXXX` in `{tmp_path}`" in caught.value.why


def test_misspelt_path_suggests_its_sibling(run: Path):
    """A path that does not exist suggests the nearest name beside it."""
    with pytest.raises(CheckpointError, match="no such directory") as caught:
        find_checkpoint(run / "checkpoints" / "iter_0000021")
    assert "did you mean" in caught.value.hint
    assert "iter_00000" in caught.value.hint


def test_link_to_nothing(tmp_path: Path):
    """A symbolic link whose target is missing is named as such; no name is suggested."""
    (tmp_path / "run").symlink_to("gone")
    with pytest.raises(CheckpointError, match="a symbolic link to nothing") as caught:
        find_checkpoint(tmp_path / "run")
    assert "`gone` does not exist" in caught.value.why
    assert "did you mean" not in caught.value.hint


def test_path_whose_parent_is_missing(tmp_path: Path):
    """A path below a directory that does not exist says so."""
    with pytest.raises(CheckpointError, match="does not exist either") as caught:
        find_checkpoint(tmp_path / "no" / "where")
    assert "give a run directory" in caught.value.hint


def test_file_is_not_a_checkpoint(tmp_path: Path):
    """A file is named as such."""
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint"):
        find_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "name, iteration",
    [
        ("iter_0000012", 12),
        ("iter_12345678", 12_345_678),
        ("iter_12", None),
        (".iter_0000012.tmp-3", None),
        ("iter_0000012.aside-1", None),
    ],
)
def test_directory_names(name: str, iteration: int | None):
    """Only the exact form of a name counts as a checkpoint's."""
    assert parse_iteration(name) == iteration
