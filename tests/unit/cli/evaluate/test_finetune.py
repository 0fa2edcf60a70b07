"""Checkpoints that `lmcore evaluate --finetune` cannot begin from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.evaluate import run
from lmcore.model.family import family_of
from lmcore.model.shape import ModelShape


def test_a_family_without_heads(tmp_path: Path) -> None:
    """The message names the family, and no flag that the user did not give."""
    settings = ModelShape(2, 24, 3, 40, 64, 384, model_family="t5")
    shape = settings.to_dict() | dict(family_of(settings).settings)
    tensors = {"a": torch.zeros(1)}
    save_checkpoint(tmp_path / "t5/checkpoints", 5, tensors, {}, model_shape=shape)
    words = f"{tmp_path}/t5 --task mnli --finetune --save {tmp_path}/a --task-data {tmp_path}"
    with pytest.raises(ConfigError, match="is a T5 model, which `--finetune` cannot") as found:
        run(words.split())
    assert "--task classification" not in found.value.render()
