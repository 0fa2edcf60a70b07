"""Tests of the choice of the newest checkpoint whose files match their checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import newest_verified, save_checkpoint, survey
from lmcore.checkpoint.layout import Survey
from lmcore.checkpoint.manifest import _checksum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with checkpoints of iterations 10 and 20."""
    for iteration in (10, 20):
        state = {"w": torch.full((40,), float(iteration))}
        meta = {"counters": {"iteration": iteration}}
        save_checkpoint(tmp_path, iteration, state, meta, model_shape={})
    return tmp_path


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Remove the last three bytes of a file."""
    path.write_bytes(path.read_bytes()[:-3])


def as_directory(path: Path) -> None:
    """Put a directory in the place of a file."""
    path.unlink()
    path.mkdir()


def as_link(path: Path) -> None:
    """Put a link to the same content in the place of a file."""
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def reseal(manifest: Path, change: Callable[[dict], None]) -> None:
    """Edit a manifest and make its checksum right again."""
    document = json.loads(manifest.read_text())
    del document["manifest_sha256"]
    change(document)
    document["manifest_sha256"] = _checksum(document)
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "name,damage",
    [
        (name, damage)
        for name in ("__0_0.distcp", ".metadata", "manifest.json")
        for damage in (flip, cut, Path.unlink, as_directory, as_link)
        if name != "manifest.json" or damage is not as_link  # the content is the same
    ],
)
def test_a_damaged_newest_is_passed_over(folder: Path, name: str, damage: Callable[[Path], None]):
    """After any damage the older checkpoint is used, and the warning names file and iteration."""
    damage(folder / "iter_0000020" / name)
    found = newest_verified(survey(folder))
    assert found.path.name == "iter_0000010"
    assert [path.name for path in found.passed_over] == ["iter_0000020"]
    warning = found.warning()
    assert warning is not None
    assert "`iter_0000020`" in warning
    assert name in warning


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_one_that_is_named_is_an_error(folder: Path, damage: Callable[[Path], None]):
    """Nothing takes the place of an explicit iteration."""
    damage(folder / "iter_0000020" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        newest_verified(survey(folder / "iter_0000020"))
    assert "__0_0.distcp" in str(caught.value.why)


def test_all_damaged(folder: Path):
    """Each checkpoint is listed with its damage."""
    flip(folder / "iter_0000010" / "__0_0.distcp")
    (folder / "iter_0000020" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        newest_verified(survey(folder))
    why = str(caught.value.why)
    assert "`iter_0000010`: file `__0_0.distcp` was altered" in why
    assert "`iter_0000020`" in why


def test_an_undamaged_one_warns_of_nothing(folder: Path):
    """An older damaged checkpoint does not matter."""
    flip(folder / "iter_0000010" / "__0_0.distcp")
    found = newest_verified(survey(folder))
    assert (found.path.name, found.warning()) == ("iter_0000020", None)


def test_iteration_in_the_manifest_is_compared(folder: Path):
    """With its counters and with the name of its directory, though the checksum is right."""
    manifest = folder / "iter_0000020" / "manifest.json"
    reseal(manifest, lambda document: document.update(iteration=9999))
    found = newest_verified(survey(folder))
    assert found.path.name == "iter_0000010"
    assert "9999" in str(found.warning())
    reseal(manifest, lambda document: document["meta"]["counters"].update(iteration=9999))
    assert newest_verified(survey(folder)).path.name == "iter_0000010"
    (folder / "iter_0000020").rename(folder / "iter_0009999")
    assert newest_verified(survey(folder)).path.name == "iter_0009999"


def test_a_damaged_one_does_not_count_as_kept(folder: Path):
    """With `--keep-last 2` the good older one stays, and the damaged one is left to its owner."""
    flip(folder / "iter_0000020" / "__0_0.distcp")
    damaged = tuple(newest_verified(survey(folder)).passed_over)
    state = {"w": torch.ones(40)}
    save_checkpoint(folder, 11, state, {}, model_shape={}, keep_last=2, damaged=damaged)
    assert sorted(path.name for path in folder.glob("iter_*")) == [
        "iter_0000010",
        "iter_0000011",
        "iter_0000020",
    ]
    assert newest_verified(survey(folder)).path.name == "iter_0000011"


def test_a_name_of_5000_letters_is_an_error(folder: Path):
    """A manifest with all checksums right, whose file names no file system has."""
    manifest = folder / "iter_0000020" / "manifest.json"
    reseal(manifest, lambda doc: doc["files"].update({"x" * 5000: doc["files"][".metadata"]}))
    with pytest.raises(CheckpointError) as caught:
        survey(folder / "iter_0000020")
    assert "5000 characters" in str(caught.value)
    assert len(str(caught.value)) < 1000


def newer(document: dict) -> None:
    """Make a manifest one of a newer format."""
    document.update(format_version=2, lmcore_version="9.1")


def test_the_newest_of_a_newer_format_is_an_error(folder: Path):
    """It is not damaged: an older one in its place would lose the steps after it."""
    reseal(folder / "iter_0000020" / "manifest.json", newer)
    found = survey(folder)
    for choose in (newest_verified, Survey.newest):
        with pytest.raises(CheckpointError, match=r"iter_0000020.*newer lmcore") as caught:
            choose(found)
        assert "install lmcore `9.1`" in str(caught.value.hint)
    assert newest_verified(survey(folder / "iter_0000010")).path.name == "iter_0000010"


def test_a_newer_format_without_save_number_or_checksum(folder: Path):
    """The iteration in its name decides if it is the newest."""
    path = folder / "iter_0000020" / "manifest.json"
    path.write_text(json.dumps({"format": "lmcore-checkpoint", "format_version": 7}))
    with pytest.raises(CheckpointError, match=r"iter_0000020.*newer lmcore"):
        newest_verified(survey(folder))


def test_an_older_one_of_a_newer_format_is_passed_over(folder: Path):
    """The newest can be read, so nothing is lost."""
    reseal(folder / "iter_0000010" / "manifest.json", newer)
    assert newest_verified(survey(folder)).path.name == "iter_0000020"


def test_a_flipped_format_version_is_damage(folder: Path):
    """A manifest that does not match its own checksum is not of a newer format."""
    path = folder / "iter_0000020" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format_version": 1', '"format_version": 3'))
    assert text != path.read_text()
    assert newest_verified(survey(folder)).path.name == "iter_0000010"
