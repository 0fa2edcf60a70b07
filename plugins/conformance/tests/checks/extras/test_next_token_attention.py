"""Checks of the attention of new tokens, which find each fault and none in right kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

CHECKS = {
    "extras.next-token-attention",
    "extras.next-token-slots",
    "extras.next-token-rows",
    "extras.next-token-refusals",
}
FAULTS = {
    "no-scale": ("extras.next-token-attention", "times the tolerance"),
    "first-heads": ("extras.next-token-attention", "6 heads on 2"),
    "not-itself": ("extras.next-token-attention", "times the tolerance"),
    "last-1024": ("extras.next-token-attention", "1 head on 1 of 16, up to 5000 tokens: the"),
    "first-1024": ("extras.next-token-attention", "1 head on 1 of 16, up to 5000 tokens: the"),
    "reads-beyond": ("extras.next-token-attention", "is finite where it should not be, or not"),
    "other-dtype": ("extras.next-token-attention", "the attention is torch.float32, not torch."),
    "no-key": ("extras.next-token-slots", "the new key is not in slot 0 at position 0"),
    "writes-at-longest": ("extras.next-token-slots", "the new key is not in slot 0 at position 0"),
    "clears-beyond": (
        "extras.next-token-slots",
        "a value of slot 0 at position 1 was changed; it has 0 tokens",
    ),
    "writes-free-slot": ("extras.next-token-slots", "a value is written into slot 4, which has no"),
    "leaks": ("extras.next-token-rows", "beside a sequence of NaN the attention is finite where"),
    "drops-channels": ("extras.next-token-refusals", "heads on 1 of 264"),
    "raises": ("extras.next-token-refusals", "it raised NotImplementedError: no float16"),
}
"""Check and message of each fault."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class Attention:
    """Attention in float64, with one thing wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def make(self, dtype: torch.dtype, channels: int) -> Any:
        """Return the function of the contract; None for many channels."""
        if self.fault == "raises" and dtype == torch.float16:
            raise NotImplementedError("no float16 here")
        return self.attend if channels < 200 or self.fault == "drops-channels" else None

    def attend(self, *arguments: Any) -> Tensor:
        q_BND, k_BKD, v_BKD, k_LKCD, v_LKCD, length_B, longest = arguments
        rows = []
        for row, length in enumerate(length_B.tolist()):
            new = (k_BKD[row], v_BKD[row])
            slots = (k_LKCD[row], v_LKCD[row])
            self.write(new, slots, longest if self.fault == "writes-at-longest" else length)
            k_KTD, v_KTD = self.read(new, slots, length, longest)
            rows.append(self.one(q_BND[row].double(), k_KTD.double(), v_KTD.double()))
        if self.fault == "writes-free-slot":
            v_LKCD[len(rows)] = 0
        out_BND = torch.stack(rows)
        if self.fault == "leaks":
            out_BND += 0 * out_BND.sum(0)
        return out_BND.to(torch.float32 if self.fault == "other-dtype" else q_BND.dtype)

    def write(self, new: Pair, slots: Pair, place: int) -> None:
        if self.fault != "no-key":
            slots[0][:, place] = new[0]
        slots[1][:, place] = new[1]
        if self.fault == "clears-beyond":
            slots[1][:, place + 1 :] = 0

    def read(self, new: Pair, slots: Pair, length: int, longest: int) -> list[Tensor]:
        """Return keys and values of a sequence."""
        if self.fault == "reads-beyond":
            return [slot[:, : longest + 1] for slot in slots]
        if self.fault == "not-itself" and length:
            return [slot[:, :length] for slot in slots]
        if self.fault == "last-1024":
            slots, length = tuple(slot[:, :length][:, -1023:] for slot in slots), min(length, 1023)
        if self.fault == "first-1024":
            length = min(length, 1023)
        pairs = zip(slots, new, strict=True)
        return [torch.cat([slot[:, :length], one[:, None]], 1) for slot, one in pairs]

    def one(self, q_ND: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> Tensor:
        repeats = q_ND.shape[0] // k_KTD.shape[0]
        if self.fault == "first-heads":
            k_NTD, v_NTD = (each.repeat(repeats, 1, 1) for each in (k_KTD, v_KTD))
        else:
            k_NTD, v_NTD = (each.repeat_interleave(repeats, 0) for each in (k_KTD, v_KTD))
        if self.fault == "drops-channels":
            k_NTD = k_NTD.clone()
            k_NTD[..., 256:] = 0
        scale = 1.0 if self.fault == "no-scale" else q_ND.shape[1] ** -0.5
        score_NT = torch.einsum("nd,ntd->nt", q_ND, k_NTD) * scale
        return torch.einsum("nt,ntd->nd", score_NT.softmax(1), v_NTD)


def test_what_is_right_passes(findings: Callable[..., Any]) -> None:
    """A right attention, one that has no kernel, and the CPU plugin's have no findings."""
    for name in sorted(CHECKS):
        assert findings(name, next_token_attention=Attention("").make) == ()
        assert findings(name, next_token_attention=lambda _dtype, _channels: None) == ()
        assert findings(name) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(findings: Callable[..., Any], fault: str) -> None:
    """The check that is about it says what is wrong."""
    name, message = FAULTS[fault]
    found = findings(name, next_token_attention=Attention(fault).make)
    assert any(message in line for line in found), found


@pytest.mark.parametrize("fault", ["clears-beyond", "leaks", "drops-channels", "raises"])
def test_other_checks_pass(findings: Callable[..., Any], fault: str) -> None:
    """A check that is not about the fault has no findings."""
    broken = {name for name in CHECKS if findings(name, next_token_attention=Attention(fault).make)}
    assert broken == {FAULTS[fault][0]}
