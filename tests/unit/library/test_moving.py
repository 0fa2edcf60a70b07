"""Scripts of Fabric and Accelerate move to lmcore by few lines, and keep their losses."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from suite.selection import peer
from torch import nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples/library/moving"
PAGE = ROOT / "docs/explanation/library-and-peers.md"
LIBRARIES = ("fabric", "accelerate")
EPOCHS = 2
MICRO_BATCHES = 4


def script(name: str) -> ModuleType:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(f"moving_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network() -> nn.Sequential:
    """Return the scripts' network."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )


def plain_losses() -> list[float]:
    """Return the losses of the scripts' loop in plain torch."""
    torch.manual_seed(1)
    spirals = script("fabric_after").spirals
    batches = DataLoader(spirals(2048), batch_size=32, shuffle=True)
    tests = DataLoader(spirals(256), batch_size=64)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    losses = []
    for _ in range(EPOCHS):
        for number, (points, kind) in enumerate(batches, 1):
            loss = nn.functional.cross_entropy(model(points), kind)
            (loss / MICRO_BATCHES).backward()
            if number % MICRO_BATCHES == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
        list(tests)  # an epoch draws a random number
    return losses


def test_few_lines_differ() -> None:
    """At most 12 lines, as many as the page says."""
    changed = {}
    for library in LIBRARIES:
        before, after = (
            (FOLDER / f"{library}_{which}.py").read_text("utf-8").splitlines()
            for which in ("before", "after")
        )
        lines = list(difflib.unified_diff(before, after, n=0))[2:]
        changed[library] = max(sum(line.startswith(sign) for line in lines) for sign in "-+")
        assert changed[library] <= 12
        assert 40 <= len(before) <= 60
        assert 40 <= len(after) <= 60
    text = f"{changed['fabric']} lines change for Fabric, {changed['accelerate']} for Accelerate"
    assert text in PAGE.read_text("utf-8")


@pytest.mark.parametrize("library", LIBRARIES)
def test_moved_script_has_the_losses_of_plain_torch(
    start: Any, tmp_path: Path, library: str
) -> None:
    """Bit for bit in one process; all of its checkpoints are kept, and the last can be loaded."""
    rt = start()
    losses = script(f"{library}_after").train(rt, EPOCHS, tmp_path)
    assert losses == plain_losses()
    assert losses[-1] < losses[0]
    updates = EPOCHS * 2048 // 32 // MICRO_BATCHES
    rt.close()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        f"iter_{updates // 2:07}",
        f"iter_{updates:07}",
    ]
    rt = start()
    rt.load(tmp_path, model=rt.prepare(network()))
    assert rt.updates == updates


@pytest.mark.peer
# Lightning's advice on a machine with Slurm.
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fabric_has_the_same_losses(start: Any, tmp_path: Path, precision: str) -> None:
    """The script before and after the move, bit for bit on one CPU process."""
    fabric = peer("lightning_fabric")
    theirs = {"fp32": "32-true", "bf16": "bf16-mixed"}[precision]
    before = fabric.Fabric(accelerator="cpu", devices=1, precision=theirs)
    expected = script("fabric_before").train(before, EPOCHS, tmp_path / "before")
    found = script("fabric_after").train(start(precision=precision), EPOCHS, tmp_path / "after")
    assert found == expected


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accelerate_has_the_same_losses(start: Any, tmp_path: Path, precision: str) -> None:
    """The script before and after the move, bit for bit on one CPU process."""
    accelerate = peer("accelerate")
    theirs = {"fp32": "no", "bf16": "bf16"}[precision]
    before = accelerate.Accelerator(
        cpu=True, mixed_precision=theirs, gradient_accumulation_steps=MICRO_BATCHES
    )
    try:
        expected = script("accelerate_before").train(before, EPOCHS, tmp_path / "before")
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = script("accelerate_after").train(start(precision=precision), EPOCHS, tmp_path / "after")
    assert found == expected
