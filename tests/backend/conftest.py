"""Every accelerator that is present here, and inputs for every op, as fixtures.

Inputs are made in float64 on the CPU: odd sizes, several layouts, hard values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.config.section import Config
from lmcore.contract import Device, OpImpl, ProbeState
from lmcore.plugin import PluginSet, Selection, create_device, discover, op_impls, select

PLUGINS = discover(env={})


def present() -> list[str]:
    """Return the plugins whose device can be used here."""
    return [
        one.name
        for one in PLUGINS.usable
        if one.probe is not None and one.probe.state is ProbeState.PRESENT
    ]


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, created, with the kernels that it offers."""

    plugins: PluginSet
    selection: Selection
    device: Device
    impls: tuple[OpImpl, ...]


@pytest.fixture(scope="session", params=present())
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    """Each present accelerator in turn."""
    env: Mapping[str, str] = {}
    selection = select(PLUGINS, requested=request.param, env=env)
    device = create_device(PLUGINS, selection, Config())
    return Accelerator(PLUGINS, selection, device, op_impls(PLUGINS, selection, device))


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: The op.
        label: Name of the special case.
        tensors: Floating inputs by position, float64; they are cast, and get gradients.
        others: Inputs that stay as they are, by position (targets, None).
        kwargs: Keyword arguments.
    """

    op: str
    label: str
    tensors: dict[int, Tensor]
    others: dict[int, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _strided(*shape: int, seed: int = 0) -> Tensor:
    """Return values that lie transposed in memory."""
    return _randn(*shape[:-2], shape[-1], shape[-2], seed=seed).transpose(-1, -2)


def _targets(count: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(9))


def _attention(
    label: str,
    shape: tuple[int, int, int, int],
    *,
    groups: int = 1,
    keys: int | None = None,
    make: Callable[..., Tensor] = _randn,
    **kwargs: Any,
) -> Case:
    batch, heads, length, channels = shape
    cached = (batch, heads // groups, keys or length, channels)
    tensors = {0: make(*shape, seed=1), 1: make(*cached, seed=2), 2: make(*cached, seed=3)}
    return Case("attention", label, tensors, kwargs=kwargs)


def _padding(batch: int, keys: int) -> Tensor:
    """Return a mask that hides the second half of the last sample's keys."""
    mask = torch.zeros(batch, 1, 1, keys, dtype=torch.bool)
    mask[-1, ..., keys // 2 :] = True
    return mask


def _hidden_row(length: int) -> Tensor:
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., 1, :] = True
    return mask


def _not_finite(*shape: int) -> Tensor:
    """Return values with NaN and infinities in what `_padding` hides."""
    values = _randn(*shape)
    values[-1, ..., -1], values[-1, ..., -2] = float("nan"), float("inf")
    return values


def _angles(length: int, half: int) -> tuple[Tensor, Tensor]:
    angles = _randn(length, half, seed=7)
    return angles.cos(), angles.sin()


def _linear_cross_entropy(label: str, tokens: int, hidden: int, vocab: int, **layout: Any) -> Case:
    make = layout.get("make", _randn)
    weights = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights[::3] = 0.0
    return Case(
        "linear_cross_entropy",
        label,
        {0: make(tokens, hidden, seed=1), 1: make(vocab, hidden, seed=2) * 0.2},
        {2: _targets(tokens, vocab), 3: weights},
    )


_COS, _SIN = _angles(5, 3)

CASES: tuple[Case, ...] = (
    _attention("causal", (2, 3, 17, 8), causal=True),
    _attention("causal, head of 5", (1, 2, 7, 5), causal=True),
    _attention("causal, strided", (2, 2, 9, 16), make=_strided, causal=True),
    _attention("bidirectional", (2, 2, 11, 8), causal=False),
    _attention("one query on a cache", (2, 4, 1, 8), keys=13, causal=True),
    _attention("three queries on a cache", (2, 4, 3, 8), keys=13, causal=True),
    _attention("more queries than keys", (1, 2, 6, 8), keys=4, causal=True),
    _attention("grouped", (2, 6, 9, 8), groups=3, causal=True),
    _attention("one key head", (2, 4, 3, 8), groups=4, keys=7, causal=True),
    _attention("padding", (2, 2, 8, 8), causal=False, mask=_padding(2, 8)),
    _attention("causal and padding", (2, 2, 8, 8), causal=True, mask=_padding(2, 8)),
    _attention("a row sees nothing", (1, 2, 5, 8), causal=False, mask=_hidden_row(5)),
    _attention("empty batch", (0, 2, 5, 8), causal=True),
    Case(
        "layer_norm",
        "odd",
        {0: _randn(2, 3, 17), 1: _randn(17, seed=1), 2: _randn(17, seed=2)},
        {3: 1e-5},
    ),
    Case(
        "layer_norm",
        "strided",
        {0: _strided(2, 5, 8), 1: _randn(8, seed=1), 2: _randn(8, seed=2)},
        {3: 1e-5},
    ),
    Case(
        "layer_norm",
        "far from zero",
        {0: _randn(3, 2, 32) + 30.0, 1: _randn(32, seed=1), 2: _randn(32, seed=2)},
        {3: 1e-5},
    ),
    Case(
        "layer_norm",
        "empty",
        {0: _randn(0, 3, 8), 1: _randn(8, seed=1), 2: _randn(8, seed=2)},
        {3: 1e-5},
    ),
    Case("rms_norm", "odd", {0: _randn(2, 3, 17), 1: _randn(17, seed=1)}, {2: 1e-6}),
    Case("rms_norm", "strided", {0: _strided(2, 5, 8), 1: _randn(8, seed=1)}, {2: 1e-6}),
    Case("rms_norm", "far from zero", {0: _randn(3, 2, 32) + 30.0, 1: _randn(32)}, {2: 1e-6}),
    Case("rms_norm", "one channel", {0: _randn(3, 2, 1), 1: _randn(1, seed=1)}, {2: 1e-2}),
    Case("rms_norm", "zeros", {0: _randn(2, 2, 8) * 0.0, 1: _randn(8, seed=1)}, {2: 1e-2}),
    Case("rms_norm", "empty", {0: _randn(0, 3, 8), 1: _randn(8, seed=1)}, {2: 1e-6}),
    Case("bias_gelu", "odd", {0: _randn(2, 3, 13) * 3, 1: _randn(13, seed=1)}),
    Case("bias_gelu", "strided", {0: _strided(2, 4, 6), 1: _randn(6, seed=1)}),
    Case(
        "bias_gelu",
        "tails",
        {
            0: torch.linspace(-12, 12, 31, dtype=torch.float64).view(1, 1, 31),
            1: _randn(31, seed=1) * 0.1,
        },
    ),
    Case("swiglu", "odd", {0: _randn(2, 3, 14)}),
    Case("swiglu", "strided", {0: _strided(2, 5, 8)}),
    Case("swiglu", "large", {0: _randn(2, 3, 64) * 20}),
    Case("swiglu", "empty", {0: _randn(0, 3, 8)}),
    Case(
        "bias_dropout_add",
        "training",
        {0: _randn(2, 3, 7), 1: _randn(7, seed=1), 2: _randn(2, 3, 7, seed=2)},
        kwargs={"dropout": 0.0, "training": True},
    ),
    Case(
        "bias_dropout_add",
        "evaluation",
        {0: _strided(2, 3, 7), 1: _randn(7, seed=1), 2: _randn(2, 3, 7, seed=2)},
        kwargs={"dropout": 0.5, "training": False},
    ),
    Case(
        "bias_dropout_add",
        "no bias",
        {0: _randn(2, 3, 7), 2: _randn(2, 3, 7, seed=2)},
        {1: None},
        {"dropout": 0.0, "training": True},
    ),
    Case(
        "bias_dropout_add",
        "strided residual",
        {0: _randn(2, 3, 7), 1: _randn(7, seed=1), 2: _strided(2, 3, 7, seed=2)},
        kwargs={"dropout": 0.0, "training": True},
    ),
    Case(
        "bias_dropout_add",
        "empty",
        {0: _randn(0, 3, 7), 1: _randn(7, seed=1), 2: _randn(0, 3, 7)},
        kwargs={"dropout": 0.5, "training": True},
    ),
    Case("scaled_masked_softmax", "no mask", {0: _randn(2, 3, 5, 7) * 4}, {1: None, 2: 0.3}),
    Case("scaled_masked_softmax", "mask", {0: _randn(2, 3, 5, 7)}, {1: _padding(2, 7), 2: 1.7}),
    Case(
        "scaled_masked_softmax", "hidden row", {0: _randn(1, 2, 5, 5)}, {1: _hidden_row(5), 2: 1.0}
    ),
    Case(
        "scaled_masked_softmax",
        "whole rows by a mask without keys",
        {0: _strided(2, 2, 5, 4)},
        {1: torch.tensor([False, True, False, True, False]).view(1, 1, 5, 1), 2: 0.5},
    ),
    Case(
        "scaled_masked_softmax",
        "what is hidden is not finite",
        {0: _not_finite(2, 3, 4, 6)},
        {1: _padding(2, 6).expand(2, 1, 4, 6), 2: 2.0},
    ),
    Case("scaled_masked_softmax", "empty", {0: _randn(0, 2, 3, 4)}, {1: None, 2: 1.0}),
    Case("linear", "with bias", {0: _randn(3, 17, 24), 1: _randn(10, 24, seed=1), 2: _randn(10)}),
    Case("linear", "without bias", {0: _strided(2, 33, 7), 1: _strided(9, 7, seed=1)}, {2: None}),
    Case("linear", "few rows", {0: _randn(1, 1, 24), 1: _randn(10, 24, seed=1)}, {2: None}),
    Case("linear", "no rows", {0: _randn(0, 5, 24), 1: _randn(10, 24, seed=1)}, {2: None}),
    Case("rotary_embedding", "part of the head", {0: _randn(2, 3, 5, 8)}, {1: _COS, 2: _SIN}),
    Case("rotary_embedding", "whole head", {0: _strided(2, 3, 5, 6)}, {1: _COS, 2: _SIN}),
    Case("rotary_embedding", "empty batch", {0: _randn(0, 3, 5, 8)}, {1: _COS, 2: _SIN}),
    Case("cross_entropy", "odd", {0: _randn(11, 37) * 5}, {1: _targets(11, 37)}),
    Case("cross_entropy", "strided", {0: _strided(11, 37)}, {1: _targets(11, 37)}),
    Case("cross_entropy", "large logits", {0: _randn(5, 9) * 40}, {1: _targets(5, 9)}),
    Case("cross_entropy", "no tokens", {0: _randn(0, 9)}, {1: _targets(0, 9)}),
    _linear_cross_entropy("odd", 13, 7, 37),
    _linear_cross_entropy("one token", 1, 5, 3),
    _linear_cross_entropy("strided", 12, 8, 19, make=_strided),
    _linear_cross_entropy("several blocks", 520, 2, 65537),
    _linear_cross_entropy("no tokens", 0, 4, 9),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a `case` on each of them; the largest is for the full set."""
    if "case" in metafunc.fixturenames:
        cases = [
            pytest.param(
                case,
                id=f"{case.op}: {case.label}",
                # In small, test_linear_cross_entropy.py has several blocks.
                marks=pytest.mark.full if case.label == "several blocks" else (),
            )
            for case in CASES
        ]
        metafunc.parametrize("case", cases)


@pytest.fixture(scope="session")
def cases() -> Sequence[Case]:
    """All cases, of all ops."""
    return CASES
