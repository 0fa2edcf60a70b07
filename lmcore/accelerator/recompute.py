"""`RecomputePolicy`: what a backward pass computes again rather than keep it from the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["RecomputePolicy", "full_policy", "none_policy"]


@dataclass(frozen=True)
class RecomputePolicy:
    """How a transformer block is run when activations are scarce.

    Attributes:
        name: What `--recompute` calls it.
        summary: What is kept and what is computed again, for help and docs.
        run: Calls a block on its arguments: `run(block, *tensors)`; None runs it plainly.
    """

    name: str
    summary: str
    run: Callable[..., Any] | None = None


def none_policy() -> RecomputePolicy:
    """Return `none`: every activation is kept."""
    return RecomputePolicy("none", "keeps every activation")


def full_policy() -> RecomputePolicy:
    """Return `full`: only block inputs are kept; dropout draws the same numbers again."""

    def run(block: Callable[..., Any], *tensors: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(block, *tensors, use_reentrant=False, preserve_rng_state=True)

    return RecomputePolicy("full", "keeps the input of each block, computes the rest again", run)
