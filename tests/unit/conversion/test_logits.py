"""Comparison of logits: a conversion that changes the model is found, and its result removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import GPT2, LLAMA, RandomState

from lmcore.base.errors import CheckpointError
from lmcore.cli.main import main
from lmcore.conversion import convert as logits
from lmcore.conversion.convert import compared_logits, convert, reason_not_to_compare
from lmcore.conversion.formats import WriteOptions
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.state import ModelState
from lmcore.model.checkpoint_format import formats

RunOf = Callable[[ModelState], Path]


@pytest.mark.parametrize("to", formats())
@pytest.mark.parametrize("state", [RandomState(GPT2), RandomState(LLAMA)], ids=["gpt2", "llama"])
def test_each_format_agrees(tmp_path: Path, run_of: RunOf, to: str, state: RandomState) -> None:
    """Weights rounded to 16 bits agree, too: the source is rounded before."""
    dtype = torch.float32 if to == "lmcore" else torch.bfloat16
    options = WriteOptions(dtype=dtype, layout=Layout(1, 2))
    done = convert(run_of(state), tmp_path / "out", to, options=options)
    assert done.agreement == "1e-6"
    assert done.not_compared is None


def changed(state: RandomState, name: str) -> RandomState:
    """Return a state with other values of one weight."""
    other = RandomState(state.shape)
    other.tensors[name, "weight"] = other.tensors[name, "weight"].roll(1, 0)
    return other


@pytest.mark.parametrize("name", RandomState(LLAMA).parameters)
def test_each_weight_counts(name: str) -> None:
    """A weight whose rows are in another order is found."""
    state = RandomState(LLAMA)
    assert compared_logits(state, state) == "1e-6"
    with pytest.raises(CheckpointError, match="does not compute what the source does"):
        compared_logits(state, changed(state, name))


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_base": 20000},
        {"layernorm_epsilon": 1e-4},
        {"rope_scaling_factor": 8.0},
        {"num_query_groups": 3, "num_attention_heads": 3, "head_dim": 4},
    ],
)
def test_settings_count(changes: dict[str, Any]) -> None:
    """Equal weights in a model of another shape give other logits."""
    shape = replace(LLAMA, rotary_base=500000)
    state = RandomState(shape)
    state.tensors = {key: tensor * 3 for key, tensor in state.tensors.items()}
    other = RandomState(replace(shape, **changes))
    other.tensors.update(
        {
            key: tensor
            for key, tensor in state.tensors.items()
            if other.tensors[key].shape == tensor.shape
        }
    )
    with pytest.raises(CheckpointError, match="does not compute"):
        compared_logits(state, other)


def test_weights_that_are_not_finite_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """They are written as they are, and a warning names them."""
    state = RandomState(LLAMA)
    compared_logits(state, state)
    assert not caplog.records
    name = "final_norm.weight"
    state.tensors[name, "weight"][0] = torch.nan
    compared_logits(state, state)
    assert f"NaN or infinite, in `{name}`" in caplog.text


def test_not_finite_logits_agree() -> None:
    """A model that overflows is compared, not taken for another one."""
    state = RandomState(GPT2)
    state.tensors["final_norm.weight", "weight"][0] = float("nan")
    assert compared_logits(state, state) == "1e-6"


def test_a_wrong_result_is_removed(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Status 1, and nothing is written; `--no-verify` writes it."""
    run = run_of(RandomState(GPT2))

    def wrong(state: ModelState, *arguments: Any, **options: Any) -> list[str]:
        other = changed(RandomState(GPT2), "blocks.1.feed_forward.up.weight")
        return write_huggingface(other, *arguments, **options)

    monkeypatch.setattr("lmcore.conversion.huggingface.write.write_huggingface", wrong)
    argv = ["checkpoint", "convert", str(run), str(tmp_path / "out"), "--to", "huggingface"]
    assert main(argv) == 1
    assert "the result was removed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main([*argv, "--no-verify"]) == 0
    assert "logits" not in capsys.readouterr().out


def test_a_model_that_does_not_fit(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One line says that it was not compared, and why."""
    state = RandomState(GPT2)
    needed = 8 * sum(tensor.numel() for tensor in state.tensors.values())
    monkeypatch.setattr(logits, "_available_memory", lambda: needed)
    assert reason_not_to_compare(state) is None
    monkeypatch.setattr(logits, "_available_memory", lambda: needed - 1)
    argv = ["checkpoint", "convert", str(run_of(state)), str(tmp_path / "out"), "--to"]
    assert main([*argv, "huggingface"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "logits" in one]
    assert line.startswith("  logits not compared: the model needs 0.0 GiB of memory")
