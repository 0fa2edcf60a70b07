"""Inputs for every op, in float64 on the host: regular and odd shapes, hard values, nothing at all.

Shapes: B batch, S queries or sequence, T tokens or keys, H hidden, I inputs, O outputs, N heads,
K key/value heads, D head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["CALLED_OPS", "CASES", "Case", "Place"]

Place = tuple[int, tuple[int, ...]]
"""An element: position of the argument, and index in it."""


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: The op.
        label: the case's peculiarity.
        kind: "value", "empty" or "nan".
        tensors: Floating arguments by position, float64; they are cast, and get gradients.
        others: Arguments that get none, by position (targets, masks, None, angles).
        kwargs: Arguments by name.
        attributes: attributes of the case for `supports`, beside dtype and device.
        nan: index of a NaN, for the kind "nan".
    """

    op: str
    label: str
    tensors: Mapping[int, Tensor]
    others: Mapping[int, Any] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "value"
    nan: Place | None = None


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _targets(count: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(9))


def _padding(batch: int, keys: int) -> Tensor:
    """Return a mask that hides the second half of the last sample's keys."""
    mask = torch.zeros(batch, 1, 1, keys, dtype=torch.bool)
    mask[-1, ..., keys // 2 :] = True
    return mask


def _hidden_row(length: int) -> Tensor:
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., 1, :] = True
    return mask


def _kind(label: str) -> str:
    return next((kind for kind in ("empty", "nan") if label.startswith(kind)), "value")


def _attention(
    label: str,
    shape_BNSD: tuple[int, int, int, int],
    *,
    groups: int = 1,
    keys: int | None = None,
    nan: Place | None = None,
    **kwargs: Any,
) -> Case:
    batch, heads, length, channels = shape_BNSD
    cached = (batch, heads // groups, keys or length, channels)
    return Case(
        "attention",
        label,
        {0: _randn(*shape_BNSD, seed=1), 1: _randn(*cached, seed=2), 2: _randn(*cached, seed=3)},
        kwargs=kwargs,
        attributes={
            "head_dim": channels,
            "num_attention_heads": heads,
            "num_query_groups": heads // groups,
            "seq_length": keys or length,
            "causal": kwargs["causal"],
            "masked": kwargs.get("mask") is not None,
            "dropout": 0.0,
        },
        kind=_kind(label),
        nan=nan,
    )


def _normal(
    op: str, label: str, x: Tensor, epsilon: float = 1e-5, nan: Place | None = None
) -> Case:
    """Return a case of a norm; the layer norm has an offset as well."""
    width = x.shape[-1]
    tensors = {0: x, 1: _randn(width, seed=1)}
    if op == "layer_norm":
        tensors[2] = _randn(width, seed=2)
    others = {len(tensors): epsilon}
    attributes = {"hidden_size": width}
    return Case(op, label, tensors, others, {}, attributes, _kind(label), nan)


def _norms(op: str) -> list[Case]:
    far = _randn(3, 2, 32) + 30.0
    return [
        _normal(op, "regular", _randn(2, 16, 128)),
        _normal(op, "odd", _randn(2, 3, 17), 1e-6),
        _normal(op, "far from zero", far, 1e-6),
        _normal(op, "small, so that epsilon counts", _randn(2, 3, 24) * 4e-3),
        _normal(op, "one row", _randn(1, 1, 40)),
        _normal(op, "zeros", _randn(2, 2, 8) * 0.0, 1e-2),
        _normal(op, "empty batch", _randn(0, 3, 8)),
        _normal(op, "nan", _randn(2, 3, 17), nan=(0, (1, 2, 5))),
    ]


def _linear(
    label: str, x: Tensor, out: int, *, bias: bool = True, nan: Place | None = None
) -> Case:
    width = x.shape[-1]
    tensors = {0: x, 1: _randn(out, width, seed=1)}
    others: dict[int, Any] = {} if bias else {2: None}
    if bias:
        tensors[2] = _randn(out, seed=2)
    attributes = {"in_features": width, "out_features": out, "bias": bias}
    return Case("linear", label, tensors, others, {}, attributes, _kind(label), nan)


def _gelu(label: str, x: Tensor, nan: Place | None = None) -> Case:
    width = x.shape[-1]
    tensors = {0: x, 1: _randn(width, seed=1) * 0.1}
    return Case("bias_gelu", label, tensors, {}, {}, {"ffn_hidden_size": width}, _kind(label), nan)


def _swiglu(label: str, x: Tensor, nan: Place | None = None) -> Case:
    attributes = {"ffn_hidden_size": x.shape[-1] // 2}
    return Case("swiglu", label, {0: x}, {}, {}, attributes, _kind(label), nan)


def _added(
    label: str,
    *shape: int,
    bias: bool = True,
    dropout: float = 0.0,
    training: bool = True,
    nan: Place | None = None,
) -> Case:
    tensors = {0: _randn(*shape), 2: _randn(*shape, seed=2)}
    if bias:
        tensors[1] = _randn(shape[-1], seed=1)
    return Case(
        "bias_dropout_add",
        label,
        dict(sorted(tensors.items())),
        {} if bias else {1: None},
        {"dropout": dropout, "training": training},
        {"hidden_size": shape[-1], "bias": bias, "dropout": dropout},
        _kind(label),
        nan,
    )


def _softmax(
    label: str, x: Tensor, mask: Tensor | None, scale: float, nan: Place | None = None
) -> Case:
    attributes = {
        "num_attention_heads": x.shape[1],
        "seq_length": x.shape[-1],
        "causal": False,
        "masked": mask is not None,
    }
    others = {1: mask, 2: scale}
    return Case("scaled_masked_softmax", label, {0: x}, others, {}, attributes, _kind(label), nan)


def _not_finite(*shape: int) -> Tensor:
    """Return values with NaN and infinity in what `_padding` hides."""
    values = _randn(*shape)
    values[-1, ..., -1], values[-1, ..., -2] = float("nan"), float("inf")
    return values


def _rotary(label: str, x: Tensor, half: int, nan: Place | None = None) -> Case:
    angles = _randn(x.shape[2], half, seed=7)
    attributes = {
        "head_dim": x.shape[-1],
        "rotary_dim": 2 * half,
        "num_attention_heads": x.shape[1],
        "seq_length": x.shape[2],
    }
    others = {1: angles.cos(), 2: angles.sin()}
    return Case("rotary_embedding", label, {0: x}, others, {}, attributes, _kind(label), nan)


def _entropy(label: str, logits: Tensor, nan: Place | None = None) -> Case:
    tokens, vocab = logits.shape
    others = {1: _targets(tokens, vocab)}
    attributes = {"vocab_size": vocab}
    return Case("cross_entropy", label, {0: logits}, others, {}, attributes, _kind(label), nan)


def _head(label: str, tokens: int, hidden: int, vocab: int, nan: Place | None = None) -> Case:
    weights = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights[1::3] = 0.0
    return Case(
        "linear_cross_entropy",
        label,
        {0: _randn(tokens, hidden, seed=1), 1: _randn(vocab, hidden, seed=2) * 0.2},
        {2: _targets(tokens, vocab), 3: weights},
        {},
        {"vocab_size": vocab, "hidden_size": hidden},
        _kind(label),
        nan,
    )


_Maker = Callable[[], list[Case]]

_MAKERS: Mapping[str, _Maker] = {
    "attention": lambda: [
        _attention("regular", (1, 2, 64, 64), causal=True),
        _attention("odd", (2, 3, 17, 8), causal=True),
        _attention("head of 5", (1, 2, 7, 5), causal=True),
        _attention("bidirectional", (2, 2, 11, 8), causal=False),
        _attention("one query on a cache", (2, 4, 1, 8), keys=13, causal=True),
        _attention("three queries on a cache", (2, 4, 3, 8), keys=13, causal=True),
        _attention("more queries than keys", (1, 2, 6, 8), keys=4, causal=True),
        _attention("grouped", (2, 6, 9, 8), groups=3, causal=True),
        _attention("one key head on a cache", (2, 4, 3, 8), groups=4, keys=7, causal=True),
        _attention("padding", (2, 2, 8, 8), causal=False, mask=_padding(2, 8)),
        _attention("causal and padding", (2, 2, 8, 8), causal=True, mask=_padding(2, 8)),
        _attention("a row sees nothing", (1, 2, 5, 8), causal=False, mask=_hidden_row(5)),
        _attention("empty batch", (0, 2, 5, 8), causal=True),
        _attention("nan", (2, 3, 17, 8), causal=True, nan=(0, (1, 2, 4, 3))),
    ],
    "layer_norm": lambda: _norms("layer_norm"),
    "rms_norm": lambda: _norms("rms_norm"),
    "linear": lambda: [
        _linear("regular", _randn(2, 32, 64), 128),
        _linear("odd", _randn(3, 17, 25), 11),
        _linear("without bias", _randn(2, 33, 7), 9, bias=False),
        _linear("one row", _randn(1, 1, 24), 10),
        _linear("one output", _randn(2, 3, 5), 1),
        _linear("empty batch", _randn(0, 5, 24), 10),
        _linear("nan", _randn(3, 17, 25), 11, nan=(0, (2, 4, 7))),
    ],
    "bias_gelu": lambda: [
        _gelu("regular", _randn(2, 16, 128)),
        _gelu("odd", _randn(2, 3, 13) * 3),
        _gelu("tails", torch.linspace(-12, 12, 31, dtype=torch.float64).view(1, 1, 31)),
        _gelu("empty batch", _randn(0, 3, 8)),
        _gelu("nan", _randn(2, 3, 13), nan=(0, (1, 0, 12))),
    ],
    "swiglu": lambda: [
        _swiglu("regular", _randn(2, 16, 256)),
        _swiglu("odd", _randn(2, 3, 14)),
        _swiglu("large", _randn(2, 3, 64) * 20),
        _swiglu("empty batch", _randn(0, 3, 8)),
        _swiglu("nan", _randn(2, 3, 14), nan=(0, (1, 1, 2))),
    ],
    "bias_dropout_add": lambda: [
        _added("regular", 2, 16, 128),
        _added("odd", 2, 3, 7),
        _added("without bias", 2, 3, 7, bias=False),
        _added("evaluation", 2, 5, 7, dropout=0.5, training=False),
        _added("empty batch", 0, 3, 7, dropout=0.5),
        _added("nan", 2, 3, 7, nan=(0, (1, 2, 6))),
    ],
    "scaled_masked_softmax": lambda: [
        _softmax("regular", _randn(2, 4, 32, 32), _padding(2, 32), 0.125),
        _softmax("odd, without a mask", _randn(2, 3, 5, 7) * 4, None, 0.3),
        _softmax("odd", _randn(2, 3, 5, 7), _padding(2, 7), 1.7),
        _softmax("a row sees nothing", _randn(1, 2, 5, 5), _hidden_row(5), 1.0),
        _softmax("what is hidden is not finite", _not_finite(2, 3, 4, 6), _padding(2, 6), 2.0),
        _softmax("empty batch", _randn(0, 2, 3, 4), None, 1.0),
        _softmax("nan", _randn(2, 3, 5, 7), None, 1.7, (0, (1, 2, 3, 4))),
    ],
    "rotary_embedding": lambda: [
        _rotary("regular", _randn(2, 4, 16, 64), 32),
        _rotary("odd, part of the head", _randn(2, 3, 5, 9), 3),
        _rotary("odd, whole head", _randn(2, 3, 5, 6), 3),
        _rotary("empty batch", _randn(0, 3, 5, 8), 3),
        _rotary("nan", _randn(2, 3, 5, 9), 3, (0, (1, 2, 3, 1))),
    ],
    "cross_entropy": lambda: [
        _entropy("regular", _randn(64, 512)),
        _entropy("odd", _randn(11, 37) * 5),
        _entropy("large logits", _randn(5, 9) * 150),
        _entropy("empty", _randn(0, 9)),
        _entropy("nan", _randn(11, 37), (0, (4, 20))),
    ],
    "linear_cross_entropy": lambda: [
        _head("regular", 64, 64, 512),
        _head("odd", 13, 7, 37),
        _head("one token", 1, 5, 3),
        _head("a large vocabulary", 70, 4, 33_001),
        _head("empty", 0, 4, 9),
        _head("nan", 13, 7, 37, (0, (3, 2))),
    ],
}

CASES: Mapping[str, tuple[Case, ...]] = {op: tuple(make()) for op, make in _MAKERS.items()}
"""By op."""

CALLED_OPS = tuple(CASES)
"""Ops that return a tensor, in the order of the core's; `adamw` and `grad_norm` have checks of
their own."""
