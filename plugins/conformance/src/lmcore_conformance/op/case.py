"""Inputs for every op, in float64 on the host: regular and odd shapes, hard values, nothing at all.

Shapes: B batch, S queries or sequence, T tokens or keys, H hidden, I inputs, O outputs, N heads,
K key/value heads, D head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CALLED_OPS",
    "CASES",
    "Case",
    "Place",
    "added_case",
    "attention_case",
    "entropy_case",
    "gelu_case",
    "head_case",
    "linear_case",
    "norm_case",
    "padding",
    "randn",
    "rotary_case",
    "softmax_case",
    "swiglu_case",
    "trained_bias_cases",
]

Place = tuple[int, tuple[int, ...]]
"""An element: position of the argument, and index in it."""

_ONE_TOKEN = "one token of each sample"
"""Label of the shapes of decoding, for which a kernel may have a separate path."""

_MASK = 5
"""Place of `mask` among the arguments of `attention`, which takes it by name."""


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: The op.
        label: the case's peculiarity.
        kind: "value", "empty" or "nan".
        tensors: Floating arguments by position, float64; they are cast, and get gradients.
        others: Arguments that get none, by position (targets, masks, None, angles).
        named: Names of the arguments by position that are passed by name.
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
    named: Mapping[int, str] = field(default_factory=dict)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers in float64, the same on every machine."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _targets(count: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(9))


def padding(batch: int, keys: int) -> Tensor:
    """Return a mask that hides the second half of the last sample's keys."""
    mask = torch.zeros(batch, 1, 1, keys, dtype=torch.bool)
    mask[-1, ..., keys // 2 :] = True
    return mask


def _bias(heads: int, length: int) -> Tensor:
    """Return an addend for each head's scores, which hides one key."""
    mask = randn(heads, length, length, seed=4).float()  # which every device has
    mask[..., 2] = -torch.inf
    return mask


def _hidden_row(length: int) -> Tensor:
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., 1, :] = True
    return mask


def _kind(label: str) -> str:
    return next((kind for kind in ("empty", "nan") if label.startswith(kind)), "value")


def attention_case(
    label: str,
    shape_BNSD: tuple[int, int, int, int],
    *,
    groups: int = 1,
    keys: int | None = None,
    nan: Place | None = None,
    **kwargs: Any,
) -> Case:
    """Return a case of `attention`."""
    batch, heads, length, channels = shape_BNSD
    cached = (batch, heads // groups, keys or length, channels)
    return Case(
        "attention",
        label,
        {0: randn(*shape_BNSD, seed=1), 1: randn(*cached, seed=2), 2: randn(*cached, seed=3)},
        kwargs=kwargs,
        attributes={
            "head_dim": channels,
            "num_attention_heads": heads,
            "num_query_groups": heads // groups,
            "seq_length": keys or length,
            "causal": kwargs["causal"],
            "masked": kwargs.get("mask") is not None,
            "dropout": 0.0,
            "score_bias": kwargs.get("mask") is not None and kwargs["mask"].is_floating_point(),
        },
        kind=_kind(label),
        nan=nan,
    )


def trained_bias_cases() -> list[Case]:
    """Return cases of `attention` with a bias of the scores that gets a gradient.

    Its samples share it, each has one, or a cache holds the first keys.
    """
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    biases = {
        "a trained bias": ((2, 4, 9, 8), None, randn(1, 4, 9, 9, seed=4)),
        "a trained bias of the heads": ((2, 4, 9, 8), None, randn(4, 9, 9, seed=4)),
        "a trained bias that hides later keys": (
            *((2, 6, 9, 16), None),
            randn(1, 6, 9, 9, seed=4).masked_fill(later, -torch.inf),
        ),
        "a trained bias that hides padding": (
            *((2, 2, 8, 64), None),
            randn(2, 2, 8, 8, seed=4).masked_fill(padding(2, 8), -torch.inf),
        ),
        "a trained bias on a cache": ((1, 2, 3, 8), 11, randn(1, 2, 3, 11, seed=4)),
    }
    cases = []
    for label, (shape, keys, bias) in biases.items():
        plain = attention_case(label, shape, keys=keys, causal=False)
        attributes = {"masked": True, "score_bias": True, "score_bias_gradient": True}
        cases.append(
            replace(
                plain,
                tensors={**plain.tensors, _MASK: bias},
                named={_MASK: "mask"},
                attributes={**plain.attributes, **attributes},
            )
        )
    return cases


def norm_case(
    op: str, label: str, x: Tensor, epsilon: float = 1e-5, nan: Place | None = None
) -> Case:
    """Return a case of a norm; the layer norm has an offset as well."""
    width = x.shape[-1]
    tensors = {0: x, 1: randn(width, seed=1)}
    if op == "layer_norm":
        tensors[2] = randn(width, seed=2)
    others = {len(tensors): epsilon}
    attributes = {"hidden_size": width}
    return Case(op, label, tensors, others, {}, attributes, _kind(label), nan)


def _norms(op: str) -> list[Case]:
    far = 0.7 * randn(3, 2, 32) + 29.0
    return [
        norm_case(op, "regular", randn(2, 16, 128)),
        norm_case(op, "odd", randn(2, 3, 17), 1e-6),
        norm_case(op, "far from zero", far, 1e-6),
        norm_case(op, "small, so that epsilon counts", randn(2, 3, 24) * 4e-3),
        norm_case(op, "one row", randn(1, 1, 40)),
        norm_case(op, _ONE_TOKEN, randn(3, 1, 40)),
        norm_case(op, "zeros", randn(2, 2, 8) * 0.0, 1e-2),
        norm_case(op, "empty batch", randn(0, 3, 8)),
        norm_case(op, "nan", randn(2, 3, 17), nan=(0, (1, 2, 5))),
    ]


def linear_case(
    label: str, x: Tensor, out: int, *, bias: bool = True, nan: Place | None = None
) -> Case:
    """Return a case of `linear`."""
    width = x.shape[-1]
    tensors = {0: x, 1: randn(out, width, seed=1)}
    others: dict[int, Any] = {} if bias else {2: None}
    if bias:
        tensors[2] = randn(out, seed=2)
    attributes = {"in_features": width, "out_features": out, "bias": bias}
    return Case("linear", label, tensors, others, {}, attributes, _kind(label), nan)


def gelu_case(label: str, x: Tensor, nan: Place | None = None) -> Case:
    """Return a case of `bias_gelu`."""
    width = x.shape[-1]
    tensors = {0: x, 1: randn(width, seed=1) * 0.1}
    return Case("bias_gelu", label, tensors, {}, {}, {"ffn_hidden_size": width}, _kind(label), nan)


def swiglu_case(label: str, x: Tensor, nan: Place | None = None) -> Case:
    """Return a case of `swiglu`."""
    attributes = {"ffn_hidden_size": x.shape[-1] // 2}
    return Case("swiglu", label, {0: x}, {}, {}, attributes, _kind(label), nan)


def added_case(
    label: str,
    *shape: int,
    bias: bool = True,
    dropout: float = 0.0,
    training: bool = True,
    nan: Place | None = None,
) -> Case:
    """Return a case of `bias_dropout_add`."""
    tensors = {0: randn(*shape), 2: randn(*shape, seed=2)}
    if bias:
        tensors[1] = randn(shape[-1], seed=1)
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


def softmax_case(
    label: str, x: Tensor, mask: Tensor | None, scale: float, nan: Place | None = None
) -> Case:
    """Return a case of `scaled_masked_softmax`."""
    attributes = {
        "num_attention_heads": x.shape[1],
        "seq_length": x.shape[-1],
        "causal": False,
        "masked": mask is not None,
    }
    others = {1: mask, 2: scale}
    return Case("scaled_masked_softmax", label, {0: x}, others, {}, attributes, _kind(label), nan)


def _not_finite(*shape: int) -> Tensor:
    """Return values with NaN and infinity in what `padding` hides."""
    values = randn(*shape)
    values[-1, ..., -1], values[-1, ..., -2] = float("nan"), float("inf")
    return values


def rotary_case(label: str, x: Tensor, half: int, nan: Place | None = None) -> Case:
    """Return a case of `rotary_embedding`."""
    angles = randn(x.shape[2], half, seed=7)
    attributes = {
        "head_dim": x.shape[-1],
        "rotary_dim": 2 * half,
        "num_attention_heads": x.shape[1],
        "seq_length": x.shape[2],
    }
    others = {1: angles.cos(), 2: angles.sin()}
    return Case("rotary_embedding", label, {0: x}, others, {}, attributes, _kind(label), nan)


def entropy_case(label: str, logits: Tensor, nan: Place | None = None) -> Case:
    """Return a case of `cross_entropy`."""
    tokens, vocab = logits.shape
    others = {1: _targets(tokens, vocab)}
    attributes = {"vocab_size": vocab}
    return Case("cross_entropy", label, {0: logits}, others, {}, attributes, _kind(label), nan)


def head_case(label: str, tokens: int, hidden: int, vocab: int, nan: Place | None = None) -> Case:
    """Return a case of `linear_cross_entropy`."""
    weights = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights[1::3] = 0.0
    return Case(
        "linear_cross_entropy",
        label,
        {0: randn(tokens, hidden, seed=1), 1: randn(vocab, hidden, seed=2) * 0.2},
        {2: _targets(tokens, vocab), 3: weights},
        {},
        {"vocab_size": vocab, "hidden_size": hidden},
        _kind(label),
        nan,
    )


_Maker = Callable[[], list[Case]]

_MAKERS: Mapping[str, _Maker] = {
    "attention": lambda: [
        attention_case("regular", (1, 2, 64, 64), causal=True),
        attention_case("odd", (2, 3, 17, 8), causal=True),
        attention_case("head of 5", (1, 2, 7, 5), causal=True),
        attention_case("head of 192", (1, 2, 9, 192), causal=True),
        attention_case("head of 256", (1, 2, 9, 256), causal=True),
        attention_case("bidirectional", (2, 2, 11, 8), causal=False),
        attention_case("one query on a cache", (2, 4, 1, 8), keys=13, causal=True),
        attention_case("three queries on a cache", (2, 4, 3, 8), keys=13, causal=True),
        attention_case("more queries than keys", (1, 2, 6, 8), keys=4, causal=True),
        attention_case("grouped", (2, 6, 9, 8), groups=3, causal=True),
        attention_case("one key head on a cache", (2, 4, 3, 8), groups=4, keys=7, causal=True),
        attention_case("padding", (2, 2, 8, 8), causal=False, mask=padding(2, 8)),
        attention_case("causal and padding", (2, 2, 8, 8), causal=True, mask=padding(2, 8)),
        attention_case("bias", (2, 4, 9, 8), causal=False, mask=_bias(4, 9)),
        attention_case(
            "causal and bias", (1, 4, 3, 8), keys=9, causal=True, mask=_bias(4, 9)[:, -3:]
        ),
        attention_case("a row sees nothing", (1, 2, 5, 8), causal=False, mask=_hidden_row(5)),
        attention_case("empty batch", (0, 2, 5, 8), causal=True),
        attention_case("nan", (2, 3, 17, 8), causal=True, nan=(0, (1, 2, 4, 3))),
    ],
    "layer_norm": lambda: _norms("layer_norm"),
    "rms_norm": lambda: _norms("rms_norm"),
    "linear": lambda: [
        linear_case("regular", randn(2, 32, 64), 128),
        linear_case("odd", randn(3, 17, 25), 11),
        linear_case("without bias", randn(2, 33, 7), 9, bias=False),
        linear_case("one row", randn(1, 1, 24), 10),
        linear_case(_ONE_TOKEN, randn(3, 1, 24), 10),
        linear_case("one output", randn(2, 3, 5), 1),
        linear_case("empty batch", randn(0, 5, 24), 10),
        linear_case("nan", randn(3, 17, 25), 11, nan=(0, (2, 4, 7))),
    ],
    "bias_gelu": lambda: [
        gelu_case("regular", randn(2, 16, 128)),
        gelu_case("odd", randn(2, 3, 13) * 3),
        gelu_case("tails", torch.linspace(-12, 12, 31, dtype=torch.float64).view(1, 1, 31)),
        gelu_case(_ONE_TOKEN, randn(3, 1, 24)),
        gelu_case("empty batch", randn(0, 3, 8)),
        gelu_case("nan", randn(2, 3, 13), nan=(0, (1, 0, 12))),
    ],
    "swiglu": lambda: [
        swiglu_case("regular", randn(2, 16, 256)),
        swiglu_case("odd", randn(2, 3, 14)),
        swiglu_case("large", randn(2, 3, 64) * 20),
        swiglu_case(_ONE_TOKEN, randn(3, 1, 48)),
        swiglu_case("empty batch", randn(0, 3, 8)),
        swiglu_case("nan", randn(2, 3, 14), nan=(0, (1, 1, 2))),
    ],
    "bias_dropout_add": lambda: [
        added_case("regular", 2, 16, 128),
        added_case("odd", 2, 3, 7),
        added_case("without bias", 2, 3, 7, bias=False),
        added_case("evaluation", 2, 5, 7, dropout=0.5, training=False),
        added_case(_ONE_TOKEN, 3, 1, 24),
        added_case("empty batch", 0, 3, 7, dropout=0.5),
        added_case("nan", 2, 3, 7, nan=(0, (1, 2, 6))),
    ],
    "scaled_masked_softmax": lambda: [
        softmax_case("regular", randn(2, 4, 32, 32), padding(2, 32), 0.125),
        softmax_case("odd, without a mask", randn(2, 3, 5, 7) * 4, None, 0.3),
        softmax_case("odd", randn(2, 3, 5, 7), padding(2, 7), 1.7),
        softmax_case("a row sees nothing", randn(1, 2, 5, 5), _hidden_row(5), 1.0),
        softmax_case("what is hidden is not finite", _not_finite(2, 3, 4, 6), padding(2, 6), 2.0),
        softmax_case(_ONE_TOKEN, randn(3, 2, 1, 11), padding(3, 11), 0.3),
        softmax_case("empty batch", randn(0, 2, 3, 4), None, 1.0),
        softmax_case("nan", randn(2, 3, 5, 7), None, 1.7, (0, (1, 2, 3, 4))),
    ],
    "rotary_embedding": lambda: [
        rotary_case("regular", randn(2, 4, 16, 64), 32),
        rotary_case("odd, part of the head", randn(2, 3, 5, 9), 3),
        rotary_case("odd, whole head", randn(2, 3, 5, 6), 3),
        rotary_case(_ONE_TOKEN, randn(3, 2, 1, 16), 8),
        rotary_case("empty batch", randn(0, 3, 5, 8), 3),
        rotary_case("nan", randn(2, 3, 5, 9), 3, (0, (1, 2, 3, 1))),
    ],
    "cross_entropy": lambda: [
        entropy_case("regular", randn(64, 512)),
        entropy_case("odd", randn(11, 37) * 5),
        entropy_case("large logits", randn(5, 9) * 150),
        entropy_case("one token", randn(1, 37)),
        entropy_case("empty", randn(0, 9)),
        entropy_case("nan", randn(11, 37), (0, (4, 20))),
    ],
    "linear_cross_entropy": lambda: [
        head_case("regular", 64, 64, 512),
        head_case("odd", 13, 7, 37),
        head_case("one token", 1, 5, 3),
        head_case("a large vocabulary", 70, 4, 33_001),
        head_case("empty", 0, 4, 9),
        head_case("nan", 13, 7, 37, (0, (3, 2))),
    ],
}

CASES: Mapping[str, tuple[Case, ...]] = {op: tuple(make()) for op, make in _MAKERS.items()}
"""By op."""

CALLED_OPS = tuple(CASES)
"""Ops that return a tensor, in the order of the core's; `adamw` and `grad_norm` have separate
checks."""
