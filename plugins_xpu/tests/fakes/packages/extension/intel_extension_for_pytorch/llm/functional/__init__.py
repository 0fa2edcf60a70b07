"""Stand-in: names, parameters and lack of a gradient are the package's."""

import torch
from torch.nn import functional


@torch.no_grad()
def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of contiguous rows."""
    assert hidden_states.is_contiguous()
    assert hidden_states.dtype == weight.dtype
    return functional.rms_norm(hidden_states, weight.shape, weight, eps)


@torch.no_grad()
def fast_layer_norm(
    hidden_states: torch.Tensor,
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Layer norm of contiguous rows."""
    assert hidden_states.is_contiguous()
    assert hidden_states.dtype == weight.dtype
    return functional.layer_norm(hidden_states, normalized_shape, weight, bias, eps)
