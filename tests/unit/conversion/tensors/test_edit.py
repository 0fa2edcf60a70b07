"""Edited copies: the change that was asked for, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import LLAMA, RandomState

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.checkpoint import (
    CheckpointReader,
    find_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from lmcore.conversion.cast import cast
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.new_directory import new_directory
from lmcore.conversion.state import ADAM, WEIGHT, ModelState
from lmcore.conversion.tensors.edit import Changes, edit
from lmcore.model.shape import ModelShape

RunOf = Callable[[ModelState], Path]


@pytest.fixture
def checkpoint(run_of: RunOf) -> Path:
    """Return a checkpoint with Adam's state."""
    return find_checkpoint(run_of(RandomState(LLAMA, (WEIGHT, *ADAM))))


def edited(checkpoint: Path, target: Path, **changes: Any) -> tuple[Path, list[str]]:
    target.mkdir()
    notes = edit(checkpoint, target, Changes(**changes))
    found = find_checkpoint(target)
    assert verify_checkpoint(found) == []
    return found, notes


def test_dropped_and_cast(checkpoint: Path, tmp_path: Path) -> None:
    found, notes = edited(
        checkpoint,
        tmp_path / "out",
        drop=("optimizer.*",),
        cast=(("model.*.qkv.weight", torch.bfloat16),),
    )
    assert len(notes) == 2
    before, after = CheckpointReader(checkpoint), CheckpointReader(found)
    assert all(name.startswith("model.") for name in after.manifest.tensors)
    for name in after.manifest.tensors:
        expected = before.read(name)
        if name.endswith("qkv.weight"):
            expected = expected.bfloat16()
        assert after.read(name).dtype == expected.dtype
        assert torch.equal(after.read(name), expected), name
    assert read_manifest(found).meta == read_manifest(checkpoint).meta
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()


def test_renamed(checkpoint: Path, tmp_path: Path) -> None:
    found, notes = edited(checkpoint, tmp_path / "out", rename=((r"model\.(.*)", r"old.\1"),))
    assert "does not load the result as a model" in notes[0]
    before, after = CheckpointReader(checkpoint), CheckpointReader(found)
    for name in before.manifest.tensors:
        new = name.replace("model.", "old.", 1) if name.startswith("model.") else name
        assert torch.equal(after.read(new), before.read(name))


def test_a_larger_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    """New rows are the mean of the tokens' rows, 0 in Adam's state; the result is a model."""
    found, notes = edited(checkpoint, tmp_path / "out", vocab_size=400)
    assert notes == []
    before, after = CheckpointReader(checkpoint), CheckpointReader(found)
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        for name in ("token_embedding.weight", "output_embedding.weight"):
            old, new = before.read(f"{kind}.{name}"), after.read(f"{kind}.{name}")
            assert torch.equal(new[:384], old)
            expected = old[:257].mean(dim=0) if kind == "model" else torch.zeros(24)
            torch.testing.assert_close(new[384:], expected.expand(16, 24))
    state = LmcoreState(tmp_path / "out")
    assert (state.shape.padded_vocab_size, state.vocab_size) == (400, 257)
    sections = state.manifest.meta["config"]["config"]
    assert sections["data"]["vocab_size"] is None
    assert sections["model"]["make_vocab_size_divisible_by"] == 400, "which pads any number to 400"


def test_a_smaller_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    found, _ = edited(checkpoint, tmp_path / "out", vocab_size=257)
    name = "model.token_embedding.weight"
    expected = CheckpointReader(checkpoint).read(name)[:257]
    assert torch.equal(CheckpointReader(found).read(name), expected)
    with pytest.raises(ConfigError, match="would cut the rows of tokens") as caught:
        edited(checkpoint, tmp_path / "cut", vocab_size=256)
    assert "the model has 257 tokens" in str(caught.value.why)
    found, _ = edited(checkpoint, tmp_path / "small", vocab_size=100, cut_tokens=True)
    assert LmcoreState(tmp_path / "small").vocab_size == 100


@pytest.mark.parametrize(
    "state",
    [
        {"exp_avg": torch.ones(2, 256, dtype=torch.uint8), "exp_avg_scale": torch.ones(2)},
        {"exp_avg": torch.ones(8, 4, dtype=torch.uint8), "exp_avg_scale": torch.ones(8)},
        {"exp_avg_sq_row": torch.ones(8)},
    ],
    ids=["codes", "codes of the weights' shape", "a vector"],
)
def test_optimizer_state_whose_rows_are_not_the_tokens(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """State in another form than the embedding is refused; the number of updates is no such one."""
    weight, shape = "token_embedding.weight", ModelShape(1, 4, 1, 4, 4, 8).to_dict()
    tensors = {f"model.{weight}": torch.ones(8, 4), f"optimizer.step.{weight}": torch.tensor(3.0)}
    others = {f"optimizer.{kind}.{weight}": tensor for kind, tensor in state.items()}
    found = save_checkpoint(tmp_path / "c", 1, {**tensors, **others}, {}, model_shape=shape)
    with pytest.raises(ConfigError, match=r"cannot resize `optimizer\.exp_avg") as caught:
        edited(found, tmp_path / "out", vocab_size=9)
    assert "--drop 'optimizer.*'" in str(caught.value.hint)
    copy, _ = edited(found, tmp_path / "again", vocab_size=9, drop=("optimizer.exp_avg*",))
    assert {name: entry.shape for name, entry in read_manifest(copy).tensors.items()} == {
        f"model.{weight}": (9, 4),
        f"optimizer.step.{weight}": (),
    }


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"drop": ("nothing.*",)}, "`nothing.*` matches no tensor"),
        ({"cast": (("nothing", torch.float16),)}, "`nothing` matches no tensor"),
        ({"rename": (("nothing", "x"),)}, "matches the name of no tensor"),
        ({"rename": ((r"model\.(", "x"),)}, "cannot rename"),
        ({"rename": ((r"model\..*", r"\1"),)}, "cannot rename"),
        ({"rename": ((r"model\..*", "x"),)}, "two tensors would be named `x`"),
        ({"drop": ("*",)}, "no tensor is left"),
    ],
)
def test_changes_that_apply_to_nothing(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        edit(checkpoint, tmp_path / "out", Changes(**changes))
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_the_result_needs_is_said(checkpoint: Path, tmp_path: Path) -> None:
    _, notes = edited(checkpoint, tmp_path / "half", cast=(("*", torch.bfloat16),))
    assert "load float32 weights only" in notes[0]
    _, notes = edited(checkpoint, tmp_path / "bare", drop=("optimizer.*",))
    assert "`--no-load-optim`" in notes[0]
    _, notes = edited(checkpoint, tmp_path / "small", vocab_size=100, cut_tokens=True)
    assert "another tokenizer" in notes[0]


def test_a_cast_that_would_lose_values(tmp_path: Path) -> None:
    tensors = {"model.w": torch.tensor([1.0, 1e6]), "rng.host": torch.arange(4, dtype=torch.uint8)}
    found = save_checkpoint(tmp_path / "c", 1, tensors, {}, model_shape={})
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="cannot be cast to float16") as caught:
        edit(found, tmp_path / "out", Changes(cast=(("*", torch.float16),)))
    assert "1 of its values" in str(caught.value.why)
    copy, _ = edited(found, tmp_path / "again", cast=(("*", torch.bfloat16),))
    assert torch.equal(CheckpointReader(copy).read("rng.host"), tensors["rng.host"])
    with pytest.raises(ConfigError, match="matches no tensor"):
        edit(found, tmp_path / "out", Changes(cast=(("rng.*", torch.bfloat16),)))


def test_a_cast_to_a_dtype_of_the_same_size() -> None:
    """A bfloat16 value beyond float16's range is an error, as of a wider dtype."""
    assert cast("w", torch.tensor([6e4]).bfloat16(), torch.float16).dtype == torch.float16
    assert cast("w", torch.tensor([3, 4]), torch.float16).tolist() == [3, 4]
    large = torch.tensor([1.0, 1e5, float("inf")]).bfloat16()
    with pytest.raises(CheckpointError, match="1 of its values are too large"):
        cast("w", large, torch.float16)
    assert cast("w", large, torch.float32).tolist() == large.tolist()


def test_a_tokenizer_that_cannot_be_read(checkpoint: Path, tmp_path: Path) -> None:
    """The error names its file and the reason; folders of a tokenizer are copied, too."""
    tokenizer = checkpoint.resolve().parent.parent / "tokenizer"
    (tokenizer / "pretrained").mkdir()
    (tokenizer / "pretrained/part.json").write_text("{}")
    edited(checkpoint, tmp_path / "copy", drop=("optimizer.*",))
    assert (tmp_path / "copy/tokenizer/pretrained/part.json").read_text() == "{}"
    (tokenizer / "pretrained/gone.json").symlink_to(tmp_path / "gone")
    wanted = f"cannot read `{tokenizer / 'pretrained/gone.json'}`"
    with (
        pytest.raises(CheckpointError, match=re.escape(wanted)) as caught,
        new_directory(tmp_path / "out") as directory,
    ):
        edit(checkpoint, directory, Changes(drop=("optimizer.*",)))
    assert caught.value.why == "No such file or directory"
