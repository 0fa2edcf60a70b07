"""Damaged files of both formats: an error, or the same model; never another one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from megatron_models import BIASED_LLAMA, MemoryState

from lmcore.base.errors import LmcoreError
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import ModelState, Progress

READERS = {"rank files": MegatronState, "torch_dist": DistributedState}
VARIANTS = 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryState, dict[str, Path]]:
    """One model in both formats."""
    state = MemoryState(BIASED_LLAMA, optimizer=True, progress=Progress(6, 48, 5))
    paths = {name: tmp_path_factory.mktemp("whole") for name in READERS}
    write_megatron(state, paths["rank files"], None, layout=Layout(2, 2), dtype=torch.bfloat16)
    write_distributed(state, paths["torch_dist"], None)
    return state, paths


def damage(path: Path, dice: random.Random) -> None:
    """Change one bit or one byte of a file, cut it off, or remove it."""
    content = bytearray(path.read_bytes())
    # Half of the changes hit the beginning, where the pickle is.
    place = dice.randrange(dice.choice([len(content), min(len(content), 20_000)]))
    match dice.choice(["bit", "bit", "bit", "byte", "cut", "remove"]):
        case "bit":
            content[place] ^= 1 << dice.randrange(8)
        case "byte":
            content[place] = dice.randrange(256)
        case "cut":
            del content[place:]
        case "remove":
            path.unlink()
            return
    path.write_bytes(content)


def same(found: ModelState, expected: ModelState) -> bool:
    return found.shape == expected.shape and all(
        torch.equal(found.read(name, kind), expected.read(name, kind))
        for name in expected.parameters
        for kind in found.kinds
    )


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 7))]
)
def test_damage(
    name: str, seed: int, checkpoints: tuple[MemoryState, dict[str, Path]], tmp_path: Path
) -> None:
    """40 variants from each seed."""
    state, paths = checkpoints
    dice, refused = random.Random(seed), 0
    for number in range(VARIANTS):
        copy = tmp_path / str(number)
        shutil.copytree(paths[name], copy)
        damage(dice.choice(sorted(path for path in copy.rglob("*") if path.is_file())), dice)
        try:
            assert same(READERS[name](copy), state)
        except LmcoreError:
            refused += 1
    assert refused > VARIANTS // 4
