"""Tests of `lmcore checkpoint inspect`, `verify`, `diff` and `edit`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from megatron_models import GPT, MemoryState
from model_states import GPT2, RandomState

from lmcore.checkpoint import save_checkpoint
from lmcore.cli.main import main
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.data.tokenizer import ByteTokenizer

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with one checkpoint."""
    write_lmcore(RandomState(GPT2, (WEIGHT, *ADAM)), tmp_path / "run", ByteTokenizer())
    return tmp_path / "run"


def damage(run: Path) -> None:
    (shard,) = run.glob("checkpoints/*/*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)


def test_inspect(run: Path, capsys: Capsys) -> None:
    assert main(["checkpoint", "inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step        7" in text
    assert "56 samples" in text
    assert "ByteTokenizer" in text
    assert "model.blocks.1.attention.qkv.weight" in text
    names = "model.final_norm.*"
    assert main(["checkpoint", "inspect", str(run), "--tensors", names, "--norms"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines[0].split() == ["tensor", "dtype", "shape", "norm", "smallest", "largest", "mean"]
    assert lines[1].startswith("model.final_norm.bias")
    assert main(["checkpoint", "inspect", str(run), "--norms", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 7
    assert record["model_shape"]["num_layers"] == 2
    found = record["tensors"]["model.final_norm.weight"]
    expected = RandomState(GPT2, (WEIGHT, *ADAM)).read("final_norm.weight").norm().item()
    assert found["norm"] == pytest.approx(expected, rel=1e-6)
    assert main(["checkpoint", "inspect", str(run), "--tensors", "model.nothing"]) == 2
    assert "matches no tensor" in capsys.readouterr().err


def test_inspect_another_programs_tokenizer(tmp_path: Path, capsys: Capsys) -> None:
    """Its name, which is all that Megatron records."""
    state = RandomState(GPT2)
    for name, note in (("ByteTokenizer", False), ("GPT2BPETokenizer", True)):
        state.tokenizer_type = name
        write_megatron(state, tmp_path / name, None)
        assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert f"tokenizer   {name}\n" in text
        assert ("is not part of the checkpoint" in text) is note
        assert main(["checkpoint", "inspect", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokenizer"] == name


def test_inspect_another_programs_run(tmp_path: Path, capsys: Capsys) -> None:
    """Its precision and its layout; a model of Hugging Face has neither."""
    state = MemoryState(GPT)
    write_megatron(state, tmp_path / "rank files", None, layout=Layout(2), dtype=torch.bfloat16)
    write_distributed(state, tmp_path / "distributed", None)
    (tmp_path / "model").mkdir()
    write_huggingface(state, tmp_path / "model", None)
    for name, precision, layout in (
        ("rank files", "bf16", {"tensor": 2, "pipeline": 1, "data": 1}),
        ("distributed", "fp32", {"tensor": 1, "pipeline": 1, "data": 1}),
        ("model", None, {}),
    ):
        assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (f"  training    precision {precision}" in lines) == (precision is not None)
        sizes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
        assert (f"  layout      {sizes}" in lines) == bool(layout)
        assert main(["checkpoint", "inspect", str(tmp_path / name), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert (record["precision"], record["layout"]) == (precision, layout)


def test_names_with_control_characters(tmp_path: Path, capsys: Capsys) -> None:
    """Names in a manifest are free text: none of it reaches a terminal as a command."""
    tensors = {"evil\x1b[2J": torch.ones(2)}
    save_checkpoint(tmp_path / "run/checkpoints", 1, tensors, {}, model_shape={})
    for words in ([], ["--norms"]):
        assert main(["checkpoint", "inspect", str(tmp_path / "run"), *words]) == 0
        text = capsys.readouterr().out
        assert ("\x1b" in text, "evil\N{REPLACEMENT CHARACTER}[2J" in text) == (False, True)


def test_verify(run: Path, capsys: Capsys) -> None:
    shutil.copytree(run / "checkpoints/iter_0000007", run / "checkpoints/iter_0000008")
    assert main(["checkpoint", "verify", str(run / "checkpoints/iter_0000007")]) == 0
    assert "intact" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run)]) == 1
    intact, damaged, *why = capsys.readouterr().out.splitlines()
    assert ("iter_0000007  intact" in intact, "iter_0000008  DAMAGED" in damaged) == (True, True)
    assert "iteration 7" in " ".join(why)
    shutil.rmtree(run / "checkpoints/iter_0000008")
    damage(run)
    assert main(["checkpoint", "verify", str(run), "--json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert "does not match its checksum" in record["problems"][0]
    assert main(["checkpoint", "verify", str(run / "nothing")]) == 2
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(run / "tokenizer")]) == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_verify_a_file_that_cannot_be_read(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another program's checkpoint that is gone is reported, without a traceback."""
    write_distributed(RandomState(GPT2), tmp_path, None)
    monkeypatch.setattr("lmcore.checkpoint.dcp_reader.open_regular", lambda _path: os.open("", 0))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "CANNOT BE READ" in text
    assert ".distcp`: No such file" in text


def test_other_programs(tmp_path: Path, capsys: Capsys) -> None:
    """`verify` says which files it read, `inspect` the step and the samples of the run."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))  # 56 samples in 7 steps
    write_megatron(state, tmp_path / "megatron", None)
    (tmp_path / "model").mkdir()
    write_huggingface(state, tmp_path / "model", None)
    for name, checked, words in (
        ("megatron", "iter_0000007", ": the newest checkpoint, `iter_0000007`  ("),
        ("megatron/iter_0000007", "", "can be read  ("),
        ("model", "", "can be read  ("),
    ):
        path = tmp_path / name
        assert main(["checkpoint", "verify", str(path)]) == 0
        assert words in capsys.readouterr().out
        assert main(["checkpoint", "verify", str(path), "--json"]) == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert record["checked"] == str(path / checked)
        files = (path / checked).rglob("*")
        assert record["bytes"] == sum(one.stat().st_size for one in files if one.is_file())
    for name, step in (("megatron", 7), ("model", None)):
        assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert ("  step        7\n  consumed    56 samples\n" in text) == (step is not None)
        assert main(["checkpoint", "inspect", str(tmp_path / name), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert (record["step"], record["consumed_samples"]) == (step, step and 56)


def test_edit_and_diff(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    command = ["checkpoint", "edit", str(run), str(out), "--drop", "optimizer.*"]
    assert main([*command, "--cast", "*.final_norm.*=bfloat16"]) == 0
    assert "load float32 weights only" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(run), str(run)]) == 0
    assert "112 tensors equal, 0 not" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(run), str(out)]) == 1
    text = capsys.readouterr().out
    assert "84 tensors `optimizer.*`" in text
    assert "model.final_norm.bias  float32 [24] -> bfloat16 [24]" in text
    assert main(["checkpoint", "diff", str(run), str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differ"] is True
    assert "26 tensors equal, 2 not" in text
    steps = ["checkpoint", "edit", str(run), str(tmp_path / "b"), "--drop", "optimizer.step.*"]
    assert main(steps) == 0
    assert main(["checkpoint", "diff", str(run), str(tmp_path / "b")]) == 1
    assert "28 tensors `optimizer.step.*`" in capsys.readouterr().out
    tolerant = ["--tensors", "model.blocks.*", "--tolerance", "0.1"]
    assert main(["checkpoint", "diff", str(run), str(out), *tolerant]) == 0
    capsys.readouterr()
    for arguments, reason in (
        ([], "nothing to change"),
        (["--cast", "model.*"], "is not NAME=DTYPE"),
        (["--cast", "model.*=int3"], "unknown dtype `int3`"),
        (["--drop", "nothing"], "matches no tensor"),
    ):
        assert main(["checkpoint", "edit", str(run), str(tmp_path / "new"), *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert main([*command[:3], str(out), "--drop", "optimizer.*"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    damage(run)
    for words in (["diff", str(run), str(out)], ["inspect", str(run), "--norms"]):
        assert main(["checkpoint", *words]) == 1
        assert "does not match its checksum" in capsys.readouterr().err
    assert main(["checkpoint", "edit", str(run), str(tmp_path / "new"), "--drop", "rng.*"]) == 1
    assert "damaged" in capsys.readouterr().err


def test_another_programs_model(tmp_path: Path, capsys: Capsys) -> None:
    """It is no damage that lmcore does not have a model; such a directory is not edited."""
    write_huggingface(RandomState(GPT2), tmp_path, None)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "can be read" in capsys.readouterr().out
    assert main(["checkpoint", "edit", str(tmp_path), str(tmp_path / "x"), "--drop", "*"]) == 2
    assert f"`lmcore checkpoint convert {tmp_path} DIR --to lmcore`" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"gpt2"', '"mixtral"'))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "CANNOT BE READ" in capsys.readouterr().out
