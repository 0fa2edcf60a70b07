"""Level 2 with `--shapes-of`: every op at the shapes of a real configuration.

A whole result in float64 on the host would take hours and terabytes.  So a kernel computes the
whole call, with an incoming gradient that is zero but in some rows (heads, for attention), and the
reference computes these rows alone: the result there, and all gradients, depend on no others.
Gradients of other rows must be zero.

Shapes: B batch, S sequence, T tokens, I inputs, O outputs, N heads, K key/value heads, D head
channels, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.contract.op.records import load_target
from lmcore.plugin import choose_precision
from lmcore_conformance.op.call import SPECS, Kernel, difference, kernels_of
from lmcore_conformance.op.case import CALLED_OPS
from lmcore_conformance.op.findings import Findings
from lmcore_conformance.op.run_shapes import RunShapes
from lmcore_conformance.op.uses import register_property
from lmcore_conformance.registry import NotApplicable, NotRun

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__: list[str] = []

Index = tuple[Any, ...]

_ROWS = 192
"""Number of rows that are compared."""

_LONGEST = 4096
"""Queries of a head that are compared; of a longer sequence the last ones."""

_MOST = 2**31
"""Elements of a tensor; a larger one is split over ranks or blocks in any run."""


@dataclass(frozen=True)
class _ShapeCase:
    """A call at its whole shapes, and the rows that are compared.

    Attributes:
        op: The op.
        label: Sizes in words.
        sizes: Sizes of the floating arguments that get gradients, by position.
        attributes: Attributes for `supports`.
        rows: Index of the compared rows of these arguments, by position; others count as a whole.
        out: Index of the compared rows of the output; None: all of it.
        others: Makes the arguments without gradients, by position, of the whole call, or of the
            compared rows alone.
        kwargs: Arguments by name.
        scale: Factors of the normal random numbers, by position.
    """

    op: str
    label: str
    sizes: Mapping[int, tuple[int, ...]]
    attributes: Mapping[str, Any]
    rows: Mapping[int, Index]
    out: Index | None
    others: Mapping[int, tuple[Any, Any]] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scale: Mapping[int, float] = field(default_factory=dict)


def _some(count: int) -> Tensor:
    """Return the first, the last and random indices below *count*, in order."""
    third = _ROWS // 3
    drawn = torch.randint(count, (third,), generator=torch.Generator().manual_seed(8))
    ends = torch.arange(min(third, count))
    found: Tensor = torch.cat((ends, drawn, count - 1 - ends)).unique()
    return found


def _places(batch: int, length: int) -> Index:
    """Return the index of some tokens of [B, S, ...]."""
    flat = _some(batch * length)
    return (flat // length, flat % length)


def _tokens(
    op: str,
    shapes: RunShapes,
    weights: Mapping[int, tuple[int, ...]],
    attributes: Mapping[str, Any],
    width: int,
    **more: Any,
) -> _ShapeCase:
    """Return the case of an op on the tokens of a micro-batch: [B, S, width] and weights."""
    index = _places(shapes.micro_batch, shapes.length)
    sizes = {0: (shapes.micro_batch, shapes.length, width), **weights}
    rows = {place: index for place, size in sizes.items() if len(size) == 3}
    label = f"{shapes.micro_batch} x {shapes.length:,} tokens of {width:,}"
    return _ShapeCase(op, label, sizes, attributes, rows, index, **more)


def _attention(shapes: RunShapes) -> Iterator[_ShapeCase]:
    batch, length = shapes.micro_batch, shapes.length
    query = (batch, shapes.heads, length, shapes.head_dim)
    keys = (batch, shapes.groups, length, shapes.head_dim)
    each = shapes.heads // shapes.groups
    last = slice(max(0, length - _LONGEST), length)
    index = (slice(batch - 1, batch), slice(shapes.heads - each, shapes.heads))
    group = (slice(batch - 1, batch), slice(shapes.groups - 1, shapes.groups))
    yield _ShapeCase(
        "attention",
        f"{batch} x {shapes.heads} heads of {shapes.head_dim}, {length:,} tokens",
        {0: query, 1: keys, 2: keys},
        {
            "head_dim": shapes.head_dim,
            "num_attention_heads": shapes.heads,
            "num_query_groups": shapes.groups,
            "seq_length": length,
            "causal": True,
            "masked": False,
            "dropout": 0.0,
        },
        {0: (*index, last), 1: group, 2: group},
        (*index, last),
        kwargs={"causal": True},
    )


def _linear(shapes: RunShapes) -> Iterator[_ShapeCase]:
    packed = (shapes.heads + 2 * shapes.groups) * shapes.head_dim
    gated = 2 if "swiglu" in shapes.ops else 1
    for inputs, outputs in dict.fromkeys(
        [
            (shapes.hidden, packed),
            (shapes.heads * shapes.head_dim, shapes.hidden),
            (shapes.hidden, gated * shapes.ffn),
            (shapes.ffn, shapes.hidden),
        ]
    ):
        weights: dict[int, tuple[int, ...]] = {1: (outputs, inputs)}
        weights |= {2: (outputs,)} if shapes.bias else {}
        attributes = {"in_features": inputs, "out_features": outputs, "bias": shapes.bias}
        others = {} if shapes.bias else {2: (None, None)}
        scale = {1: inputs**-0.5}
        yield _tokens("linear", shapes, weights, attributes, inputs, others=others, scale=scale)


def _norm(op: str) -> Callable[[RunShapes], Iterator[_ShapeCase]]:
    def cases(shapes: RunShapes) -> Iterator[_ShapeCase]:
        count = 2 if op == "layer_norm" else 1
        weights = dict.fromkeys(range(1, count + 1), (shapes.hidden,))
        others = {count + 1: (shapes.epsilon, shapes.epsilon)}
        attributes = {"hidden_size": shapes.hidden}
        yield _tokens(op, shapes, weights, attributes, shapes.hidden, others=others)

    return cases


def _gelu(shapes: RunShapes) -> Iterator[_ShapeCase]:
    attributes = {"ffn_hidden_size": shapes.ffn}
    yield _tokens("bias_gelu", shapes, {1: (shapes.ffn,)}, attributes, shapes.ffn)


def _swiglu(shapes: RunShapes) -> Iterator[_ShapeCase]:
    yield _tokens("swiglu", shapes, {}, {"ffn_hidden_size": shapes.ffn}, 2 * shapes.ffn)


def _add(shapes: RunShapes) -> Iterator[_ShapeCase]:
    residual = {2: (shapes.micro_batch, shapes.length, shapes.hidden)}
    weights = {1: (shapes.hidden,), **residual} if shapes.bias else residual
    attributes = {"hidden_size": shapes.hidden, "bias": shapes.bias, "dropout": 0.0}
    others = {} if shapes.bias else {1: (None, None)}
    kwargs = {"dropout": 0.0, "training": True}
    yield _tokens(
        "bias_dropout_add",
        shapes,
        weights,
        attributes,
        shapes.hidden,
        others=others,
        kwargs=kwargs,
    )


def _rotary(shapes: RunShapes) -> Iterator[_ShapeCase]:
    heads = shapes.heads + shapes.groups
    generator = torch.Generator().manual_seed(7)
    angles = torch.randn(shapes.length, shapes.rotary_dim // 2, generator=generator)
    index = (slice(shapes.micro_batch - 1, shapes.micro_batch), slice(heads - 2, heads))
    yield _ShapeCase(
        "rotary_embedding",
        f"{shapes.micro_batch} x {heads} heads of {shapes.head_dim}, {shapes.length:,} tokens",
        {0: (shapes.micro_batch, heads, shapes.length, shapes.head_dim)},
        {
            "head_dim": shapes.head_dim,
            "rotary_dim": shapes.rotary_dim,
            "num_attention_heads": heads,
            "seq_length": shapes.length,
        },
        {0: index},
        index,
        others={1: (angles.cos(), angles.cos()), 2: (angles.sin(), angles.sin())},
    )


def _head(shapes: RunShapes) -> Iterator[_ShapeCase]:
    count = shapes.micro_batch * shapes.length
    index = (_some(count),)
    generator = torch.Generator().manual_seed(9)
    target = torch.randint(shapes.vocab, (count,), generator=generator)
    weight = torch.zeros(count)
    weight[index] = torch.rand(len(index[0]), generator=generator)
    yield _ShapeCase(
        "linear_cross_entropy",
        f"{count:,} tokens of {shapes.hidden:,}, {shapes.vocab:,} in the vocabulary",
        {0: (count, shapes.hidden), 1: (shapes.vocab, shapes.hidden)},
        {"vocab_size": shapes.vocab, "hidden_size": shapes.hidden},
        {0: index},
        None,
        others={2: (target, target[index]), 3: (weight, weight[index])},
        scale={1: shapes.hidden**-0.5},
    )


_MAKERS: Mapping[str, Callable[[RunShapes], Iterator[_ShapeCase]]] = {
    "attention": _attention,
    "layer_norm": _norm("layer_norm"),
    "rms_norm": _norm("rms_norm"),
    "linear": _linear,
    "bias_gelu": _gelu,
    "swiglu": _swiglu,
    "bias_dropout_add": _add,
    "rotary_embedding": _rotary,
    "linear_cross_entropy": _head,
}


def _shapes(bench: Bench, op: str) -> str:
    """Call each kernel at the whole shapes, and compare some rows and all gradients."""
    shapes = bench.shapes
    assert shapes is not None
    if op not in shapes.ops:
        raise NotApplicable(f"`{shapes.name}` has no `{op}`")
    policy = choose_precision(bench.all_precision_policies, shapes.precision)
    dtype = policy.activations
    if dtype not in SPECS[op].tolerances:
        raise NotRun(f"`{op}` has no tolerance for {dtype}")
    findings = Findings()
    for case in _MAKERS[op](shapes):
        largest = max(torch.Size(size).numel() for size in case.sizes.values())
        if largest > _MOST:
            raise NotRun(f"{case.label}: a tensor would have {largest:,} elements")
        able = [
            kernel
            for kernel in kernels_of(bench, op)
            if kernel.does(bench.device.type, dtype, case.attributes)
        ]
        own = [kernel for kernel in able if kernel.impl is not None]
        for kernel in own or able:  # a run binds the reference only if there is no other
            with findings.of(kernel, f"{shapes.name}, {case.label}, {dtype}") as add:
                for wrong in _differences(bench, kernel, case, dtype):
                    add(wrong)
    return f"{findings.conclude()}; {shapes.words}, {dtype}"


def _differences(bench: Bench, kernel: Kernel, case: _ShapeCase, dtype: str) -> Iterator[str]:
    """Yield how the compared rows, and all gradients, differ from the reference's."""
    kind = getattr(torch, dtype)
    torch.manual_seed(3)
    bench.device.seed(3)
    whole: dict[int, Any] = {
        place: _sent(bench, pair[0], kind) for place, pair in case.others.items()
    }
    part: dict[int, Any] = {place: _rounded(pair[1], kind) for place, pair in case.others.items()}
    for place, size in case.sizes.items():
        made = torch.randn(size, device=bench.torch_device) * case.scale.get(place, 1.0)
        whole[place] = made.to(kind).requires_grad_()
        part[place] = _picked(bench, whole[place], case.rows.get(place)).requires_grad_()
    out = kernel.function(*(whole[place] for place in sorted(whole)), **case.kwargs)
    reference = load_target(SPECS[case.op].reference)
    right = reference(*(part[place] for place in sorted(part)), **case.kwargs)
    grad = torch.randn(right.shape, dtype=torch.float64).to(out.dtype).double()
    incoming = _spread(bench, out, grad, case.out)
    places = list(case.sizes)
    grads = torch.autograd.grad(out, [whole[place] for place in places], incoming)
    wanted = torch.autograd.grad(right, [part[place] for place in places], grad)
    found = _picked(bench, out, case.out).reshape(right.shape)
    if wrong := difference(found, right.detach(), case.op, dtype):
        yield f"the output {wrong}"
    for place, got, exact in zip(places, grads, wanted, strict=True):
        index = case.rows.get(place)
        if wrong := difference(
            _picked(bench, got, index).reshape(exact.shape), exact, case.op, dtype
        ):
            yield f"the gradient of argument {place + 1} {wrong}"
        elif index is not None and _elsewhere(got, index):
            yield f"the gradient of argument {place + 1} is not zero in rows without a gradient"


def _sent(bench: Bench, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(bench.torch_device, dtype if value.is_floating_point() else None)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype).double() if floating else value


def _picked(bench: Bench, tensor: Tensor, index: Index | None) -> Tensor:
    """Return the compared rows on the host in float64: tokens as [1, T, ...]."""
    if index is None:
        return bench.host(tensor)
    rows = bench.host(tensor.detach()[_on(index, tensor.device)])
    return rows.unsqueeze(0) if len(index) == 2 and isinstance(index[0], Tensor) else rows


def _spread(bench: Bench, out: Tensor, grad: Tensor, index: Index | None) -> Tensor:
    """Return an incoming gradient of the whole output, which is zero but in the compared rows."""
    if index is None:
        return grad.to(bench.torch_device, out.dtype)
    incoming = torch.zeros_like(out)
    place = _on(index, out.device)
    incoming[place] = grad.to(bench.torch_device, out.dtype).reshape(incoming[place].shape)
    return incoming


def _elsewhere(grad: Tensor, index: Index) -> bool:
    """Return True if a gradient is not zero outside the compared rows."""
    others = grad.detach().clone()
    others[_on(index, others.device)] = 0
    return bool((others != 0).any())


def _on(index: Index, device: torch.device) -> Index:
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in index)


for _op in CALLED_OPS:
    if _op in _MAKERS:
        register_property(
            _op,
            "shapes",
            _shapes,
            "`{op}` and its gradients are right at the shapes and in the precision of the "
            "configuration that `--shapes-of` names.",
            "A kernel may be right for every shape but yours.",
            seconds=280.0,
            option="--shapes-of",
        )
