"""Conversions of the weights alone, and comparisons of what they write."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron_models import trained

from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import WEIGHT, ModelState


def converted(source: Path, target: Path) -> LmcoreState:
    """Return the run that the conversion of the weights alone writes."""
    done = convert(source, target, "lmcore", weights_only=True)
    assert not done.optimizer
    assert "the optimizer's state, if there is any, was left out: `--weights-only`" in done.notes
    assert not any("Adam" in note for note in done.notes)
    found = LmcoreState(target)
    assert found.kinds == (WEIGHT,)
    return found


def same_weights(found: ModelState, expected: ModelState, dtype: torch.dtype) -> None:
    """Compare all weights with the weights of *expected*, rounded to a dtype."""
    for name in expected.parameters:
        assert torch.equal(found.read(name).float(), expected.read(name).to(dtype).float()), name


def require_weights_alone(to: str, tmp_path: Path) -> None:
    """Write the weights of a run of lmcore in a format; they are all that the files have."""
    state = trained()
    write_megatron(state, tmp_path / "in", None)
    convert(tmp_path / "in", tmp_path / "run", "lmcore")
    convert(tmp_path / "run", tmp_path / "out", to, weights_only=True)
    found = read_state(tmp_path / "out")
    assert found.kinds == (WEIGHT,)
    same_weights(found, state, torch.float32)
    assert found.progress is not None
    assert (found.progress.iteration, found.progress.consumed_samples) == (7, 70)
    assert (found.progress.optimizer_step, found.progress.adam) == (None, None)
    files = [path.name for path in (tmp_path / "out").rglob("*")]
    assert not any("exp_avg" in name or "optim_states" in name for name in files)
