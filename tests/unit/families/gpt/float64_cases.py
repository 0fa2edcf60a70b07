"""Batch, loss and parameters that the models in numpy and float64 share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import nn

Array = npt.NDArray[np.float64]

TOKENS = np.array([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
TARGETS = np.array([[17, 4, 4, 29, 0, 8, 31], [1, 2, 30, 9, 9, 5, 0]])
WEIGHTS = np.array([[1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.25, 3.0]])


def weighted_loss(logits: Array) -> float:
    """Return the weighted sum of the cross entropies of TARGETS."""
    peak = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
    chosen = np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
    return float(((normalizer - chosen) * WEIGHTS).sum())


def parameters(model: nn.Module) -> dict[str, Array]:
    """Return all parameters as float64 arrays, copied."""
    return {
        name: tensor.detach().double().numpy().copy() for name, tensor in model.named_parameters()
    }
