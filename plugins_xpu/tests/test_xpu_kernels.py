"""Attention by torch; torch's other functions are tested with the core."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shared_keys_and_values(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients torch gets one for each query head, without them what there is."""
    from torch.nn import functional

    from lmcore.contract.op import reference
    from lmcore_xpu.kernel.attention_sdpa import attention

    seen = []
    attend = functional.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((k.shape[1], v.shape[1]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn(2, heads, 5, 8, generator=generator, requires_grad=True)
        for heads in (4, groups, groups)
    ]
    wanted = reference.attention(*values, causal=True)
    gradients = torch.autograd.grad(wanted.square().sum(), values)
    found = attention(*values, causal=True)
    torch.testing.assert_close(found, wanted)
    for result, other in zip(
        torch.autograd.grad(found.square().sum(), values), gradients, strict=True
    ):
        torch.testing.assert_close(result, other)
    with torch.no_grad():
        torch.testing.assert_close(attention(*values, causal=True), wanted)
    assert seen == [(4, 4), (groups, groups)]
