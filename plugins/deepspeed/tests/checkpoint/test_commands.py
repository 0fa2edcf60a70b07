"""`lmcore checkpoint inspect` and `verify` of DeepSpeed's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import Layout, write
from megatron_models import GPT, MemoryState
from model_states import GPT2, RandomState

from lmcore.cli.main import main
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore_deepspeed.checkpoint.write import write_deepspeed

Capsys = pytest.CaptureFixture[str]


def inspected(path: Path, capsys: Capsys) -> tuple[str, dict[str, Any]]:
    """Return what `inspect` prints, and its JSON."""
    assert main(["checkpoint", "inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(path), "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_inspect(tmp_path: Path, capsys: Capsys) -> None:
    """The precision of the run, if it is known, and its layout."""
    state = MemoryState(GPT)
    write(state, tmp_path / "plain", Layout(2, zero=1, data=4))
    write(state, tmp_path / "float16", Layout(zero=1, data=2), fp16=True, bf16=False)
    for name, precision, layout in (
        ("plain", None, {"tensor": 2, "pipeline": 1, "data": 4}),
        ("float16", "fp16", {"tensor": 1, "pipeline": 1, "data": 2}),
    ):
        text, record = inspected(tmp_path / name, capsys)
        lines = text.splitlines()
        assert (f"  training    precision {precision}" in lines) == (precision is not None)
        sizes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
        assert f"  layout      {sizes}" in lines
        assert (record["precision"], record["layout"]) == (precision, layout)


def test_verify(tmp_path: Path, capsys: Capsys) -> None:
    """It says which files it read, `inspect` the step and the samples of the run."""
    write_deepspeed(RandomState(GPT2, (WEIGHT, *ADAM)), tmp_path / "run", None)
    write_deepspeed(RandomState(GPT2), tmp_path / "weights", None)
    for name, checked, words in (
        ("run", "global_step7/zero", ": the universal checkpoint `global_step7/zero` alone"),
        ("run/global_step7", "zero", ": the universal checkpoint `zero` alone, not the weights in"),
        ("weights", "global_step0", ": the newest checkpoint, `global_step0`  ("),
    ):
        path = tmp_path / name
        assert main(["checkpoint", "verify", str(path)]) == 0
        assert words in capsys.readouterr().out
        assert main(["checkpoint", "verify", str(path), "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert record["checked"] == str(path / checked)
        files = (path / checked).rglob("*")
        assert record["bytes"] == sum(one.stat().st_size for one in files if one.is_file())
    text, record = inspected(tmp_path / "run", capsys)
    assert "  step        7\n  consumed    56 samples\n" in text
    assert (record["step"], record["consumed_samples"]) == (7, 56)
