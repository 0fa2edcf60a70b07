"""Stand-in: names, parameters and lack of a gradient are the package's."""

import torch
from torch.nn import functional


@torch.no_grad()
def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of contiguous rows."""
    assert hidden_states.numel()
    assert hidden_states.is_contiguous()
    assert weight.is_contiguous()
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
    assert hidden_states.numel()
    assert hidden_states.is_contiguous()
    assert weight.is_contiguous()
    assert hidden_states.dtype == weight.dtype
    return functional.layer_norm(hidden_states, normalized_shape, weight, bias, eps)


@torch.no_grad()
def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: torch.Tensor = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation of halves of the last dim, in place, in the package's order of steps for GPUs."""
    assert query.numel()
    assert rotary_half
    assert position_ids is None
    assert sin.shape[-1] == cos.shape[-1] == rotary_dim
    if query.shape[-2] == key.shape[-2]:  # one launch, whose outputs have one shape
        assert query.shape == key.shape
    for tensor in (query, key):
        part = tensor[..., :rotary_dim]
        first, second = part.float().chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        part.copy_(part * cos.expand(part.shape) + turned * sin.expand(part.shape))
    return query, key


@torch.no_grad()
def silu_mul(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor = None) -> torch.Tensor:
    """SiLU of x times y; views with strides are accepted."""
    assert x.numel()
    out = torch.empty_like(x) if out is None else out
    assert out.shape == x.shape == y.shape
    return out.copy_(functional.silu(x) * y)
