"""Comparison of the logits of a few tokens by the model that was read and by the written one.

The reader of each format fills a model of the shape that it finds, which computes the tokens in
float32 by the core's own ops, on the CPU.  The tokens are from all of the vocabulary,
at positions from all of the context.  One model at a time is in memory.

Shapes: B batch, S sequence, V rows of the vocabulary.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, host_memory, several
from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.state import ModelState
from lmcore.families.build import create_model
from lmcore.families.op_binding import OpBinding
from lmcore.families.protocol import Model
from lmcore.model.family import family_of

__all__ = ["compared_logits", "reason_not_to_compare"]

logger = logging.getLogger(__name__)

_BOUNDS = ("1e-6", "1e-5")
"""Differences of logits relative to the largest one; beyond the last the models disagree.

Products of matrices with other numbers of rows may add their terms in another order.
"""
_MOST_TOKENS = 32
_MODELS = 2
"""Number of models that the available memory must have room for."""
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def reason_not_to_compare(state: ModelState) -> str | None:
    """Return why the logits of a model cannot be compared; None if they can.

    Args:
        state: State that was read.
    """
    family = family_of(state.shape)
    if state.shape.task or family.load_model().outputs is Model.outputs:
        return f"models of the kind {family.name} do not compute them for a comparison"
    elements = sum(math.prod(size) for size in state.parameters.values())
    needed, available = _MODELS * elements * torch.float32.itemsize, _available_memory()
    if needed <= available:
        return None
    return (
        f"the model needs {needed / 2**30:.1f} GiB of memory (twice in float32), and "
        f"{available / 2**30:.1f} GiB are available"
    )


def compared_logits(source: ModelState, target: ModelState) -> str:
    """Return the bound that the difference of the logits keeps, relative to the largest logit.

    The weights of *source* are rounded to the dtypes of *target* first.

    Args:
        source: State that was read.
        target: State that was written from it.

    Raises:
        CheckpointError: The logits differ, or *target* cannot be read.
    """
    rows = min(one.shape.padded_vocab_size for one in (source, target))
    rows = min(rows, source.vocab_size or rows)
    positions = min(one.shape.max_position_embeddings for one in (source, target))
    places_BS = _spread(positions, min(_MOST_TOKENS, positions))
    order = torch.randperm(places_BS.numel(), generator=torch.Generator().manual_seed(0))
    tokens_BS = _spread(rows, places_BS.numel())[:, order]
    known = target.parameters.keys()

    strange: list[str] = []

    def rounded(name: str) -> Tensor:
        tensor = source.read(name)
        if not bool(tensor.isfinite().all()):
            strange.append(name)
        return tensor.to(target.dtype(name)) if name in known else tensor

    all_expected = _outputs(source, rounded, tokens_BS, places_BS)
    if strange:
        logger.warning(
            "`%s` has weights that are NaN or infinite, in %s: they are written as they are",
            *(source.path, several(strange)),
        )
    all_found = _outputs(target, target.read, tokens_BS, places_BS)
    pairs = zip(all_expected, all_found, strict=True)
    most = max(_difference(one[..., :rows], other[..., :rows]) for one, other in pairs)
    for bound in _BOUNDS:
        if most <= float(bound):
            return bound
    raise CheckpointError(
        "the written model does not compute what the source does",
        why=f"its logits of {tokens_BS.numel()} tokens differ by up to {most:.1e} of the largest "
        f"one, in {source.format} and {target.format}; the result was removed",
        hint="report this as an error of lmcore, with the shape of the model; `--no-verify` keeps "
        "the result",
    )


def _spread(size: int, count: int) -> Tensor:
    """Return numbers from 0 to *size* - 1 at equal distances, [1, S]."""
    return torch.linspace(0, size - 1, count).long().unsqueeze(0)


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest expected value."""
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = (expected - found).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    return float(difference.max()) / max(largest, torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _outputs(
    state: ModelState, read: Callable[[str], Tensor], tokens_BS: Tensor, places_BS: Tensor
) -> Sequence[Tensor]:
    """Return the logits of all heads of a model with the weights of *state*."""
    with torch.device("meta"):
        model = create_model(state.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.to_empty(device="cpu").eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(read(name))
    return model.outputs(tokens_BS, places_BS)


def _available_memory() -> int:
    """Return the memory that can be used without swapping, in bytes."""
    found = host_memory() // 2
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text(), re.MULTILINE)
        found = int(match[1]) * 1024 if match else found
        limit = int((_GROUP / "memory.max").read_text())  # `max` without a limit
        return min(found, limit - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return found
