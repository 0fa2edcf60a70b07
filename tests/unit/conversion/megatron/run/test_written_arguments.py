"""Notes of a written checkpoint: how to start Megatron, and what it computes differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_files import run_progress
from megatron_models import GPT, MemoryState

from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed


def test_gelu_without_biases(tmp_path: Path) -> None:
    """Megatron's fused approximation needs a bias: a note says that it computes another GELU."""
    for name, changes, expected in (
        ("biases", {}, False),
        ("none", {"add_bias_linear": False}, True),
        ("gated", {"add_bias_linear": False, "swiglu": True}, False),
    ):
        state = MemoryState(replace(GPT, **changes))
        for write in (write_megatron, write_distributed):
            notes = write(state, tmp_path / name / write.__name__, None)
            assert any("computes GELU exactly" in note for note in notes) == expected


def test_flags_for_megatron(tmp_path: Path) -> None:
    """Megatron loads an optimizer and its schedule together, or neither."""
    for name, changes, flag in (
        ("both", {}, "--use-checkpoint-opt_param-scheduler"),
        ("no schedule", {"schedule": None}, "--no-load-optim"),
    ):
        state = MemoryState(GPT, optimizer=True, progress=run_progress(**changes))
        notes = write_megatron(state, tmp_path / name, None)
        assert f"--ckpt-format torch {flag} --no-load-rng" in notes[-1]
    weights = MemoryState(GPT, progress=run_progress())
    assert "--no-load-optim" in write_megatron(weights, tmp_path / "weights", None)[-1]
