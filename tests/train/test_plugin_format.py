"""A checkpoint format that a plugin adds, the example: converted both ways, inspected, trained."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_plugins import installed_example, needs_examples
from model_states import GPT2, RandomState, same_state

from lmcore.base.errors import CheckpointError, PluginError
from lmcore.cli.main import main
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.native.write import write_lmcore
from lmcore.model.checkpoint_format import format_of, formats
from lmcore.plugin import discover

PACKAGE = "lmcore_example_format"

pytestmark = needs_examples


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the example for this process and those it starts, and takes it away again."""
    with installed_example("plugin_format", PACKAGE, "npz", tmp_path / "site", monkeypatch):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with random weights."""
    write_lmcore(RandomState(GPT2), tmp_path / "run", None)
    return tmp_path / "run"


@pytest.mark.usefixtures("installed")
def test_there_and_back(run: Path, tmp_path: Path, capsys: Any) -> None:
    """The command knows the format, its directory is recognized, and every value is kept."""
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["checkpoint", "convert", str(run), str(there), "--to", "npz"]) == 0
    assert "lmcore -> numpy" in capsys.readouterr().out
    assert format_of(there) is None  # the command took its record away
    discover(probe=False)
    assert format_of(there) == "npz"
    assert main(["checkpoint", "convert", str(there), str(back), "--to", "lmcore"]) == 0
    same_state(read_state(back), RandomState(GPT2))
    assert main(["checkpoint", "diff", str(run), str(there), "--tensors", "model.*"]) == 0
    assert main(["checkpoint", "verify", str(there)]) == 0
    flags = ["--to", "npz", "--tensor-model-parallel-size", "2"]
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "x"), *flags]) == 2
    err = capsys.readouterr().err
    assert "`--tensor-model-parallel-size` has no effect with `--to npz`" in err
    assert "`--to megatron`" in err
    flags = ["--to", "npz", "--dtype", "bfloat16"]
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "x"), *flags]) == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("installed")
def test_other_processes(run: Path, tmp_path: Path) -> None:
    """A process that only inspects finds the plugin by itself."""
    discover(probe=False)
    convert(run, tmp_path / "there", "npz")
    command = [sys.executable, "-m", "lmcore", "checkpoint", "inspect", str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "numpy" in done.stdout


@pytest.mark.usefixtures("installed")
def test_training(train: Any, train_once: Any, tmp_path: Path) -> None:
    """A run begins with its weights, which another process describes before torch is loaded."""
    first = train_once("--train-iters 2")
    discover(probe=False)
    convert(first.directory, tmp_path / "there", "npz")
    run = train("more", f"--train-iters 1 --lr 1e-30 --min-lr 0 --load {tmp_path / 'there'}")
    assert run.status == 0, run.err
    found = read_state(run.directory)
    same = read_state(tmp_path / "there")
    for name in same.parameters:
        assert (found.read(name) - same.read(name)).abs().max() < 1e-6


@pytest.mark.usefixtures("installed")
def test_damage(run: Path, tmp_path: Path, capsys: Any) -> None:
    """Damaged files are errors of the format; a failing `matches` names the plugin."""
    discover(probe=False)
    convert(run, tmp_path / "there", "npz")
    weights = tmp_path / "there/npz_weights.npz"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_state(tmp_path / "there")
    middle = len(whole) // 2
    weights.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert main(["checkpoint", "verify", str(tmp_path / "there")]) == 1
    shapes = {"final_norm.weight": np.zeros(5), "final_norm.bias": np.zeros(24, np.int32)}
    for name, array in shapes.items():
        arrays = dict(np.load(io.BytesIO(whole)))
        np.savez(weights, **{**arrays, name: array})
        there, out = str(tmp_path / "there"), str(tmp_path / "out")
        assert main(["checkpoint", "convert", there, out, "--to", "lmcore"]) == 1
        assert main(["checkpoint", "verify", there]) == 1
        assert not (tmp_path / "out").exists()
        said = capsys.readouterr()
        assert f"`{name}` is" in said.err
        assert f"`{name}` is" in said.out
    weights.write_bytes(whole)
    model = tmp_path / "there/npz_model.json"
    model.write_text(model.read_text().replace('"num_layers": 2', '"num_layers": "2"'))
    assert main(["checkpoint", "verify", str(tmp_path / "there")]) == 1
    object.__setattr__(formats()["npz"].matches, "function", lambda _: 1 / 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PluginError, match=r"format `npz` of plugin `npz` .* failed"):
        format_of(tmp_path / "empty")


@pytest.mark.usefixtures("installed")
def test_plugin_check(capsys: Any) -> None:
    """It finds nothing wrong with the example, in a process that knows the format already."""
    pytest.importorskip("lmcore_conformance")
    discover(probe=False)
    assert main(["plugin", "check", "npz"]) == 0, capsys.readouterr().out


def test_an_unknown_format(run: Path, tmp_path: Path, capsys: Any) -> None:
    """Without the plugin the name is unknown, with the known ones in the hint."""
    argv = ["checkpoint", "convert", str(run), str(tmp_path / "x"), "--to", "npz"]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "`--to npz`: unknown format" in err
    assert "known: `huggingface`, `lmcore`, `megatron`" in err
