"""The examples have the losses of the same loop in plain torch, bit for bit in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from example_loops import EXAMPLES, TEXT, PlainLoop, example
from suite.selection import peer


@pytest.mark.parametrize(
    "name, options",
    [
        ("bare_loop", {"epochs": 2}),
        ("convolution", {"epochs": 1}),
        ("character_gpt", {"text": TEXT, "steps": 6, "length": 32, "accumulate": 2}),
    ],
)
def test_losses_are_those_of_plain_torch(start: Any, name: str, options: dict[str, Any]) -> None:
    """The same batches, dropout and updates."""
    train = example(name).train
    found, expected = (train(rt, **options) for rt in (start(), PlainLoop()))
    losses = [each[0] if isinstance(each, tuple) else each for each in (found, expected)]
    assert losses[0] == losses[1]
    assert len(losses[0]) > 5
    assert losses[0][-1] < losses[0][0]


@pytest.mark.peer
def test_a_finetuned_llama_has_the_losses_of_plain_torch(start: Any, tmp_path: Path) -> None:
    """A model of transformers from a local directory; the losses of unseen text, too."""
    transformers = peer("transformers")
    llama = example("finetune_llama")
    torch.manual_seed(5)
    llama.make_model().save_pretrained(tmp_path)
    options = {"text": TEXT, "steps": 6, "length": 32, "directory": str(tmp_path)}
    found, expected = (llama.train(rt, **options)[:2] for rt in (start(), PlainLoop()))
    assert isinstance(llama.make_model(), transformers.LlamaForCausalLM)
    assert found == expected
    losses, (before, after) = found
    assert len(losses) == 12
    assert after < before


@pytest.mark.peer
def test_a_llama_with_the_kernels_of_the_device(start: Any) -> None:
    """They leave the losses equal, but for rounding."""
    peer("transformers")
    llama, options = example("finetune_llama"), {"text": TEXT, "steps": 4, "length": 32}
    with_kernels, _, model, _ = llama.train(start(), **options, kernels=True)
    assert "forward" in vars(model.model.norm)
    assert with_kernels == pytest.approx(llama.train(PlainLoop(), **options)[0], abs=1e-4)


def test_an_example_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the example ends with an instruction, not with a traceback."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"needs transformers .*: pip install transformers"):
        example("finetune_llama")


def test_no_device_is_named() -> None:
    """Nothing in the examples is about one kind of hardware."""
    texts = [path.read_text("utf-8") for path in EXAMPLES.rglob("*.py")]
    assert len(texts) >= 8
    assert not any(word in text for text in texts for word in ("cuda", "xpu", '"cpu"', "nccl"))
