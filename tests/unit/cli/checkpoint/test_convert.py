"""Tests of `lmcore checkpoint convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_states import GPT2, RandomState, same_state

from lmcore.cli.main import main
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.data.tokenizer import ByteTokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    state = RandomState(GPT2)
    state.vocab_size = 257
    write_huggingface(state, directory, ByteTokenizer())
    return directory


def test_a_downloaded_model_generates(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directly and after its conversion, with the same text."""
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(model), str(run), "--to", "lmcore"]) == 0
    printed = capsys.readouterr().out
    assert f"next: lmcore generate --load {run}" in printed
    texts = []
    for directory in (model, run):
        command = ["generate", "--load", str(directory), "--prompt", "ab", "--greedy"]
        assert main([*command, "--tokens", "12", "--device", "cpu", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_json_and_errors(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["checkpoint", "convert", str(model), str(tmp_path / "out")]
    assert main([*command, "--to", "huggingface", "--dtype", "bfloat16", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["source"], record["target"]) == ("Hugging Face", "Hugging Face")
    assert main([*command, "--to", "lmcore"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--to", "lmcore", "--dtype", "float16"]) == 2
    assert "keeps weights in float32" in capsys.readouterr().err
    assert main([*command, "--to", "onnx"]) == 2
    assert "`huggingface`" in capsys.readouterr().err
    assert main(["checkpoint", "convret"]) == 2
    assert "convert" in capsys.readouterr().err
    assert main(["checkpoint"]) == 0
    assert "convert" in capsys.readouterr().out


def test_a_run_goes_to_megatron_and_back(model: Path, tmp_path: Path) -> None:
    """Through a layout of several ranks, with the same weights; a wrong layout is a usage error."""
    there, back = tmp_path / "megatron", tmp_path / "back"
    command = ["checkpoint", "convert", str(model), str(there), "--to", "megatron"]
    assert main([*command, "--tensor-model-parallel-size", "2"]) == 2
    stages = ["--pipeline-model-parallel-size", "2"]
    assert main([*command, *stages, "--megatron-names", "legacy"]) == 0
    assert len(list(there.glob("release/mp_rank_00_00*/model_optim_rng.pt"))) == 2
    assert main(["checkpoint", "convert", str(there), str(back), "--to", "huggingface"]) == 0
    same_state(HuggingFaceState(back), HuggingFaceState(model))
