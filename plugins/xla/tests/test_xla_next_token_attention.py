"""Attention over whole slots equals attention to the tokens alone; on the host's tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lmcore_xla.next_token_attention import attend

LENGTHS = [0, 3, 6]
SLOTS, POSITIONS, CHANNELS = 4, 7, 16


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_each_sequence_sees_its_own_tokens(groups, dtype, tolerance):
    """The new key and value are written; what is beyond them, NaN here, is not read."""
    torch.manual_seed(1)
    query = torch.randn(len(LENGTHS), 4, CHANNELS, dtype=dtype)
    key, value = torch.randn(2, len(LENGTHS), groups, CHANNELS, dtype=dtype)
    keys, values = torch.randn(2, SLOTS, groups, POSITIONS, CHANNELS, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        keys[row, :, length:] = values[row, :, length:] = torch.nan
    last = keys[3].clone()
    found = attend(query, key, value, keys, values, torch.tensor(LENGTHS), max(LENGTHS))
    for row, length in enumerate(LENGTHS):
        assert torch.equal(keys[row, :, length], key[row])
        assert torch.equal(values[row, :, length], value[row])
        k, v = keys[row, :, : length + 1], values[row, :, : length + 1]
        right = scaled_dot_product_attention(
            query[row, :, None].double(), k.double(), v.double(), enable_gqa=True
        )[:, 0]
        assert (found[row].double() - right).abs().max() < tolerance
    assert found.dtype == dtype
    assert torch.equal(keys[3], last)
