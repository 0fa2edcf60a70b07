"""Sliding windows against the usual loop of `transformers`: one window at a time, all logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.cli.evaluate import run
from lmcore.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.full

_POSITIONS = 64
_SIZES = {"vocab_size": 257, "initializer_range": 0.3}
_TEXT = "".join(f"Line {number} is not the last one, is it?\n" for number in range(60))


def written(folder: Path, family: str) -> Any:
    """Write a model of random weights for Hugging Face; return it."""
    import transformers

    transformers.set_seed(3)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_positions=_POSITIONS, n_embd=32, n_layer=2, n_head=4, **_SIZES
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            max_position_embeddings=_POSITIONS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **_SIZES,
        )
        model = transformers.LlamaForCausalLM(config)
    model.eval().save_pretrained(folder)
    return model


def perplexity(model: Any, stride: int) -> float:
    """Return the perplexity by the loop of the documentation of `transformers`."""
    tokens = torch.tensor([ByteTokenizer().encode(_TEXT)])
    total, count, before = 0.0, 0, 0
    for begin in range(0, tokens.shape[1], stride):
        end = min(begin + _POSITIONS, tokens.shape[1])
        inputs = tokens[:, begin:end]
        targets = inputs.clone()
        targets[:, : before - end] = -100
        with torch.no_grad():
            loss = model(inputs, labels=targets).loss
        # The model moves the labels by one: the first of the first window has no prediction.
        number = int((targets[:, 1:] != -100).sum())
        total, count, before = total + loss.item() * number, count + number, end
        if end == tokens.shape[1]:
            break
    assert count == tokens.shape[1] - 1
    return math.exp(total / count)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("stride", [7, 32])
def test_the_loop_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, stride: int
) -> None:
    """The last token of its windows is a target alone, so that one position less is read."""
    pytest.importorskip("transformers")
    model = written(tmp_path / "model", family)
    (tmp_path / "text.txt").write_text(_TEXT)
    flags = ["--tokenizer-type", "ByteTokenizer", "--device", "cpu", "--precision", "fp32"]
    flags += ["--task", "wikitext103_stream", "--stride", str(stride)]
    flags += ["--task-data", f"wikitext103_stream={tmp_path / 'text.txt'}"]
    flags += ["--seq-length", str(_POSITIONS - 1), "--json"]
    assert run([str(tmp_path / "model"), *flags]) == 0
    ((found,),) = [list(one.values()) for one in json.loads(capsys.readouterr().out).values()]
    value = found["metrics"]["token_perplexity"]["value"]
    assert value == pytest.approx(perplexity(model, stride), rel=1e-4)
