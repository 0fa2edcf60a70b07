"""Each field of DeepSpeed's files, with a value of each JSON type: read or refused."""

from __future__ import annotations

from pathlib import Path

import deepspeed_files
import pytest
import torch
from foreign_values import VALUES, accept_or_refuse, places
from megatron_models import GPT, MemoryState

from lmcore.conversion.formats import read_state


@pytest.mark.parametrize(
    "layout",
    [
        deepspeed_files.Layout(zero=1),
        pytest.param(
            deepspeed_files.Layout(form="plain", dtype=torch.float32), marks=pytest.mark.full
        ),
    ],
    ids=["zero", "plain"],
)
def test_files_of_deepspeed(layout: deepspeed_files.Layout, tmp_path: Path) -> None:
    """Every mapping in the model's and the optimizer's file but the weights."""
    root = deepspeed_files.write(MemoryState(GPT, optimizer=True), tmp_path, layout)
    for path in sorted(root.glob("*.pt")):
        with deepspeed_files.importable():
            content = torch.load(path, weights_only=False)
        more = [("module",), ("ds_config",), ("universal_checkpoint_info",), ("lr_scheduler",)]
        known = [keys for keys in places(content, 2) if keys[0] != "module"]
        for number, keys in enumerate(dict.fromkeys([*known, *more])):
            for value in VALUES if keys == ("module",) else VALUES[number % 6 :: 6]:
                changed = {**content}
                if len(keys) > 1:
                    changed[keys[0]] = {**content[keys[0]], keys[1]: value}
                else:
                    changed[keys[0]] = value
                with deepspeed_files.importable():
                    torch.save(changed, path)
                accept_or_refuse(lambda: read_state(tmp_path), (path.name, keys, value))
        with deepspeed_files.importable():
            torch.save(content, path)
