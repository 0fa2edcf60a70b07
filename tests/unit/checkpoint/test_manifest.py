"""Tests of the manifest: what is accepted, and how model shapes are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import (
    check_shape,
    newest_verified,
    read_manifest,
    save_checkpoint,
    survey,
)
from lmcore.checkpoint.manifest import _checksum


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and make its checksum agree."""
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text())
    del document["manifest_sha256"]
    change(document)
    document["manifest_sha256"] = _checksum(document)
    path.write_text(json.dumps(document))


def test_contents(saved: Path):
    """The manifest states versions, iteration, shape, tensors and files."""
    manifest = read_manifest(saved)
    assert (manifest.iteration, manifest.sequence, manifest.format_version) == (100, 1, 1)
    assert manifest.tensors["model.bf16"].dtype == "bfloat16"
    assert manifest.tensors["model.bf16"].shape == (7, 5)
    assert manifest.model_shape == {"num_layers": 2, "hidden_size": 256, "vocab_size": 512}
    assert {name: (saved / name).stat().st_size for name in manifest.files} == {
        name: entry.size for name, entry in manifest.files.items()
    }


def test_newer_format_is_named(saved: Path):
    """A checkpoint of a newer format says so and which lmcore to install."""
    rewrite(saved, lambda document: document.update(format_version=2, lmcore_version="9.1"))
    with pytest.raises(CheckpointError, match="newer lmcore") as caught:
        read_manifest(saved)
    assert caught.value.why == "its format version is 2; this lmcore reads up to 1"
    assert str(caught.value.hint).startswith("install lmcore `9.1` or newer")


def test_manifest_of_another_program(saved: Path):
    """A manifest of another program is not taken for one of ours."""
    rewrite(saved, lambda document: document.update(format="other"))
    with pytest.raises(CheckpointError, match="not the manifest of an lmcore checkpoint"):
        read_manifest(saved)


def test_edited_value_is_noticed(saved: Path):
    """A counter that was edited by hand does not pass for what was saved."""
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"consumed_samples": 96', '"consumed_samples": 97'))
    with pytest.raises(CheckpointError, match="was altered after it was written"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda d: d.pop("iteration"), "`iteration`"),
        (lambda d: d.update(extra=1), "`extra`"),
        (lambda d: d.update(iteration=-1), "`iteration` is not a count"),
        (lambda d: d.update(iteration=True), "`iteration` is not a count"),
        (lambda d: d.update(sequence="1"), "`sequence` is not a count"),
        (lambda d: d.update(format_version="1"), "`format_version` is not a count"),
        (lambda d: d.update(torch_version=2), "`torch_version` is not a string"),
        (lambda d: d.update(meta=[]), "`meta` is not an object"),
        (lambda d: d.update(model_shape={"a": [1]}), "`model_shape` entry `a`"),
        (lambda d: d["tensors"].update(x={"dtype": "float32"}), "tensor `x`"),
        (lambda d: d["tensors"].update(x={"dtype": "f", "shape": [-1]}), "shape of tensor `x`"),
        (lambda d: d["tensors"].update(x={"dtype": 3, "shape": [1]}), "`dtype` is not a string"),
        (lambda d: d["files"].update({"../x": {}}), "file `../x` is not a name inside"),
        (lambda d: d["files"].update({"/etc/x": {}}), "file `/etc/x` is not a name inside"),
        (lambda d: d["files"].update({"..": {}}), "file `..` is not a name inside"),
        (lambda d: d["files"].update({"\ud800": {}}), r"`\ud800` in `files` cannot be encoded"),
        (lambda d: d["files"].update({"\0": {}}), "is not a name inside the checkpoint"),
        (lambda d: d["files"].update({"é" * 128: {}}), "has 128 characters"),
        (lambda d: d["tensors"].update({"a\udfff": {}}), r"`a\udfff` in `tensors` cannot"),
        (lambda d: d.update(torch_version="\ud800"), "in `torch_version` cannot be encoded"),
        (lambda d: d.update(model_shape={"a": "\ud800"}), "in `a` cannot be encoded"),
        (lambda d: d["files"].update(x={"size": 1}), "file `x`"),
        (lambda d: d["files"].update(x={"size": 1, "crc32": "zz"}), "`crc32` of file `x`"),
        (lambda d: d["files"].update(x={"size": -1, "crc32": "0" * 8}), "`size` is not a count"),
    ],
)
def test_schema_is_strict(saved: Path, change: Callable[[dict[str, Any]], object], reason: str):
    """A field that is missing, unknown or of the wrong kind is named."""
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match="does not follow the manifest's schema") as caught:
        read_manifest(saved)
    assert reason in caught.value.why


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"9" * 5000],
)
def test_not_a_manifest(saved: Path, content: bytes):
    """Bytes that are no manifest end in an error that names the file."""
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(saved)


def test_reading_is_bounded(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """A file far larger than any manifest is not read into memory."""
    monkeypatch.setattr("lmcore.checkpoint.manifest.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        read_manifest(saved)


def test_same_shape_passes(saved: Path):
    """Equal shapes pass, in any order and with whole numbers as integers or floats."""
    shape = {"vocab_size": 512, "hidden_size": 256.0, "num_layers": 2}
    check_shape(read_manifest(saved), shape)


def test_every_difference_of_shape_is_named(saved: Path):
    """All differing entries are named at once, also those on one side only."""
    with pytest.raises(CheckpointError, match="iteration 100 is of another model") as caught:
        check_shape(
            read_manifest(saved), {"num_layers": 2, "hidden_size": 512, "normalization": "RMSNorm"}
        )
    assert caught.value.why.splitlines() == [
        "hidden_size: checkpoint 256, model 512",
        "normalization: checkpoint absent, model RMSNorm",
        "vocab_size: checkpoint 512, model absent",
    ]


def test_true_is_not_one(saved: Path):
    """A flag and a number are different, though Python compares them equal."""
    with pytest.raises(CheckpointError, match="num_layers: checkpoint 2, model True"):
        check_shape(
            read_manifest(saved), {"num_layers": True, "hidden_size": 256, "vocab_size": 512}
        )


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda d: d["tensors"].update({"\ud800": d["tensors"]["model.bf16"]}), "tensors"),
        (lambda d: d["files"].update({"\udc80": {"size": 0, "crc32": "00000000"}}), "files"),
        (lambda d: d["model_shape"].update({"\ud800": 1}), "model_shape"),
        (lambda d: d["model_shape"].update(normalization="\ud800"), "normalization"),
        (lambda d: d.update(torch_version="2.9\udfff"), "torch_version"),
    ],
)
def test_surrogates_beside_an_older_checkpoint(
    tmp_path: Path, saved: Path, change: Callable[[dict[str, Any]], object], field: str
):
    """The older one is used, and a line that every stream can print says why."""
    older = save_checkpoint(tmp_path / "run", 90, {"w": torch.ones(2)}, {}, model_shape={})
    newer = shutil.copytree(saved, tmp_path / "run/iter_0000100")
    rewrite(newer, lambda document: document.update(sequence=2))
    assert newest_verified(survey(tmp_path / "run")).path == newer
    rewrite(newer, change)
    with pytest.raises(CheckpointError, match="does not follow the manifest's schema") as caught:
        read_manifest(newer)
    assert f"in `{field}` cannot be encoded in UTF-8" in caught.value.why
    found = newest_verified(survey(tmp_path / "run"))
    assert (found.path, list(found.passed_over)) == (older, [newer])
    warning = str(found.warning())
    assert "`iter_0000100`" in warning
    assert caught.value.why in warning
    warning.encode()  # as a strict UTF-8 stream does
