"""Rank files of Megatron with the position of a run, for tests that read or change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron_models import GPT, MemoryState

from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.state import Progress
from lmcore.model.shape import ModelShape

RANK_FILE = "model_optim_rng.pt"
SCHEDULE = {
    "style": "cosine",
    "highest": 3e-4,
    "lowest": 3e-5,
    "warmup_samples": 12.5,
    "decay_samples": 1000,
    "cooldown_fraction": 0.25,
}
ADAM_SETTINGS = {"beta1": 0.85, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def edit(path: Path, change: Any) -> None:
    """Replace a rank file by its content after *change*, which may return another content."""
    content = torch.load(path, weights_only=False)
    torch.save(change(content) or content, path)


def one_rank(directory: Path, shape: ModelShape = GPT, style: str = "core-local") -> Path:
    """Write weights as a checkpoint of one rank and return its file."""
    write_megatron(MemoryState(shape), directory, None, style=style)
    return directory / "release" / "mp_rank_00" / RANK_FILE


def run_progress(**changes: Any) -> Progress:
    """Return the position of a run after 6 steps, with schedule and settings of Adam."""
    values = {
        "optimizer_step": 5,
        "schedule": SCHEDULE,
        "adam": ADAM_SETTINGS,
        "scheduled_samples": 40,
    }
    values |= changes
    return Progress(iteration=6, consumed_samples=48, **values)


def only_file(directory: Path) -> Path:
    """Return the file of a checkpoint of one rank."""
    (found,) = directory.glob(f"*/*/{RANK_FILE}")
    return found


def content_of(directory: Path) -> dict[str, Any]:
    """Return the content of the file of a checkpoint of one rank."""
    content: dict[str, Any] = torch.load(only_file(directory), weights_only=False)
    return content
