"""Comparison of checkpoints: every kind of difference, with hand-computed distances."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_states import GPT2, RandomState

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import find_checkpoint, save_checkpoint
from lmcore.conversion.convert import convert
from lmcore.conversion.state import ModelState
from lmcore.conversion.tensors.content import content_of, matching, statistics_of
from lmcore.conversion.tensors.difference import compare


def saved(folder: Path, tensors: dict[str, torch.Tensor], **shape: int) -> Path:
    return save_checkpoint(folder, 1, tensors, {}, model_shape=shape)


def test_differences_by_hand(tmp_path: Path) -> None:
    one = {
        "same": torch.tensor([1.0, math.nan]),
        "moved": torch.tensor([3.0, 4.0]),
        "shape": torch.zeros(2),
        "dtype": torch.ones(2),
        "first": torch.ones(1),
        "nan": torch.tensor([1.0, math.nan]),
    }
    other = {
        "same": one["same"],
        "moved": torch.tensor([3.0, 4.5]),
        "shape": torch.zeros(3),
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "second": torch.ones(1),
        "nan": torch.tensor([1.0, 2.0]),
    }
    a = content_of(saved(tmp_path / "a", one, num_layers=1, hidden_size=4))
    b = content_of(saved(tmp_path / "b", other, num_layers=2, hidden_size=4))
    found = compare(a, b)
    assert found.found
    assert (found.only_first, found.only_second) == (["first"], ["second"])
    assert found.forms == {
        "dtype": ("float32 [2]", "bfloat16 [2]"),
        "shape": ("float32 [2]", "float32 [3]"),
    }
    by_name = {one.name: one for one in found.values}
    assert by_name.keys() == {"moved", "nan"}
    assert (by_name["moved"].largest, by_name["moved"].relative) == (0.5, 0.5 / 5.0)
    assert by_name["moved"].count == 1
    assert by_name["nan"].largest == math.inf
    assert found.shape == {"num_layers": (1, 2)}
    assert found.equal == 1
    assert [one.name for one in compare(a, b, tolerance=0.5).values] == ["nan"]
    assert not compare(a, a).found
    dtype = {"patterns": ("dtype",)}
    assert compare(a, b, **dtype).shapes == []
    assert compare(a, dataclasses.replace(b, model_shape=a.model_shape), **dtype).found
    alike = compare(a, dataclasses.replace(b, model_shape=a.model_shape), tolerance=0.1, **dtype)
    assert (alike.found, alike.equal) == (False, 1), "the values are equal, in another dtype"
    only = compare(a, b, patterns=("first",))
    assert (only.only_first, only.only_second, only.values) == (["first"], [], [])
    nan = next(one for one in found.to_json()["values"] if one["name"] == "nan")
    assert nan["largest"] is None, "strict JSON has no infinity"
    assert compare(a, b, patterns=("mov*",)).values[0].name == "moved"


def test_formats_are_compared_by_lmcores_names(
    tmp_path: Path, run_of: Callable[[ModelState], Path]
) -> None:
    run = run_of(RandomState(GPT2))
    convert(run, tmp_path / "megatron", "megatron")
    ours = content_of(find_checkpoint(run))
    found = compare(ours, content_of(tmp_path / "megatron"))
    assert not found.found
    assert found.equal == len(RandomState(GPT2).parameters)
    assert found.settings == {}


def test_statistics_by_hand() -> None:
    found = statistics_of(torch.tensor([3.0, -4.0, math.inf, math.nan]))
    assert (found.norm, found.minimum, found.maximum, found.mean) == (5.0, -4.0, 3.0, -0.5)
    assert found.non_finite == 2
    assert statistics_of(torch.zeros(0)).norm is None
    assert statistics_of(torch.tensor([1, 2])).mean == 1.5


def test_a_pattern_without_a_tensor(tmp_path: Path) -> None:
    content = content_of(saved(tmp_path, {"model.norm": torch.ones(2)}))
    assert matching(content, ("model.*",)) == ["model.norm"]
    with pytest.raises(ConfigError, match="matches no tensor") as caught:
        matching(content, ("model.nrom",))
    assert "`model.norm`" in str(caught.value.hint)
