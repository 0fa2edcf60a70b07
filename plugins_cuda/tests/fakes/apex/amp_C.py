"""Stand-in for apex's compiled functions over lists of tensors, called by position as in C++."""

import torch

calls: list[str] = []


def multi_tensor_adam(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction,
    weight_decay, /,
):  # fmt: skip
    """Update the second to fourth lists in place: weights and both moments."""
    assert noop_flag.dtype == torch.int32
    assert isinstance(step, int)
    assert (mode, bias_correction, chunk_size) == (1, 1, 65536)
    calls.append(f"adam {step} {len(tensor_lists[0])}")
    for g, p, m, v in zip(*tensor_lists, strict=True):
        assert g.dtype == p.dtype
        assert all(x.is_contiguous() and x.numel() for x in (g, p, m, v))
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt() + epsilon
        p.sub_(lr * (m / (1 - beta1**step) / denominator + weight_decay * p))


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python=None, /):
    """Return the norm over all tensors, [1], and nothing of each."""
    assert noop_flag.dtype == torch.int32
    (tensors,) = tensor_lists
    assert len({x.dtype for x in tensors}) == 1
    assert all(x.is_contiguous() and x.numel() for x in tensors)
    calls.append(f"l2norm {len(tensors)}")
    total = sum(x.float().square().sum() for x in tensors)
    return total.sqrt().view(1), torch.empty(0)
