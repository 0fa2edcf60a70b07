"""Kernels that are the references with one thing wrong each."""

import functools
import inspect
import math
import threading
import time

import torch
from torch import nn
from torch.nn import functional as f

from lmcore.contract import OP_SPECS
from lmcore.contract.op import reference
from lmcore_fake.device import MADE_FOR

MUTANTS = {}
"""Faults for L2's values and gradients: attributes of this module, by op and id."""

MISFITS = {}
"""Faults for other checks, in the same form; behind a point the id has what sets it apart."""

HALF = set()
"""Op and id of the faults that are in bfloat16 alone."""


BIASED = {"bias-gradient", "bias-gradient.samples"}
"""Ids of the faults that claim to add a bias to the scores, and to give its gradient."""


def _add(table, op, name, function):
    target = f"k_{op}_{name}".replace("-", "_").replace(".", "_")
    globals()[target] = functools.wraps(getattr(reference, op))(function)
    table[op, name] = target


def mutant(op, name):
    return lambda function: _add(MUTANTS, op, name, function)


def misfit(op, name, *, half=False):
    if half:
        HALF.add((op, name))
    return lambda function: _add(MISFITS, op, name, function)


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def _first_dropped(grad):
    changed = grad.clone()
    changed.flatten()[:1] = 0
    return changed


_CHANGES = {
    "scaled": lambda grad: grad * 0.999,
    "negated": lambda grad: -grad,
    "element-dropped": _first_dropped,
}


def _spoilt(op, place, change):
    plain = getattr(reference, op)

    def function(*arguments, **named):
        changed = list(arguments)
        if changed[place] is not None:
            changed[place] = _Spoil.apply(changed[place], change)
        return plain(*changed, **named)

    return function


# Every gradient of every op, changed a little, in sign, and in one element.
for _spec in OP_SPECS:
    _names = list(inspect.signature(getattr(reference, _spec.name)).parameters)
    for _argument in _spec.gradients:
        for _change, _changed in _CHANGES.items():
            _place = _names.index(_argument)
            _add(
                MUTANTS,
                _spec.name,
                f"grad-{_argument}-{_change}",
                _spoilt(_spec.name, _place, _changed),
            )


@mutant("attention", "value-scale")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    wider = math.sqrt(q.shape[-1] / (q.shape[-1] + 0.1))
    return reference.attention(q * wider, k, v, causal=causal, dropout=dropout, mask=mask)


@mutant("attention", "value-upper-left-triangle")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(diagonal=1)
        mask = later if mask is None else mask | later
    return reference.attention(q, k, v, causal=False, dropout=dropout, mask=mask)


@mutant("attention", "value-groups-interleaved")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask)


@mutant("layer_norm", "value-epsilon")
def _(x, weight, bias, epsilon):
    return reference.layer_norm(x, weight, bias, 2 * epsilon)


@mutant("layer_norm", "value-unbiased")
def _(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.var(-1, keepdim=True, unbiased=x.shape[-1] > 1) + epsilon)
    return centred * scale * weight + bias


@mutant("layer_norm", "value-one-pass-variance")
def _(x, weight, bias, epsilon):
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * torch.rsqrt(variance.clamp(min=0) + epsilon) * weight + bias


@mutant("layer_norm", "grad-without-the-mean")
def _(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdim=True).detach()
    variance = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + epsilon) * weight + bias


@mutant("layer_norm", "grad-without-the-variance")
def _(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True).detach()
    return centred * torch.rsqrt(variance + epsilon) * weight + bias


@mutant("rms_norm", "value-epsilon-outside")
def _(x, weight, epsilon):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + epsilon) * weight


@mutant("rms_norm", "value-weight-plus-one")
def _(x, weight, epsilon):
    return reference.rms_norm(x, weight + 1, epsilon)


@mutant("rms_norm", "grad-without-the-norm")
def _(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon).detach() * weight


@mutant("linear", "value-bias-of-half")
def _(x, weight, bias):
    return f.linear(x, weight, None if bias is None else bias * 0.999)


@mutant("linear", "value-low-precision")
def _(x, weight, bias):
    # As a matrix unit with 10 bits of mantissa would.
    x, weight = ((tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (x, weight))
    return f.linear(x, weight, bias)


@mutant("bias_gelu", "value-constant")
def _(x, bias):
    y = x + bias
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.0447 * y.pow(3))))


@mutant("bias_gelu", "value-erf-form")
def _(x, bias):
    return f.gelu(x + bias)


@mutant("bias_gelu", "grad-without-the-tanh")
def _(x, bias):
    y = x + bias
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y.pow(3))
    return 0.5 * y * (1 + torch.tanh(inner).detach())


@mutant("swiglu", "value-halves-exchanged")
def _(x):
    gate, up = x.chunk(2, -1)
    return up * torch.sigmoid(up) * gate


@mutant("swiglu", "value-sigmoid-constant")
def _(x):
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(1.001 * gate) * up


@mutant("swiglu", "grad-without-the-sigmoid")
def _(x):
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate).detach() * up


@mutant("bias_dropout_add", "value-bias-after-dropout-twice")
def _(x, bias, residual, *, dropout, training):
    bias = None if bias is None else 1.001 * bias
    return reference.bias_dropout_add(x, bias, residual, dropout=dropout, training=training)


@mutant("bias_dropout_add", "value-drops-in-evaluation")
def _(x, bias, residual, *, dropout, training):
    return reference.bias_dropout_add(x, bias, residual, dropout=dropout, training=True)


@mutant("scaled_masked_softmax", "value-scale")
def _(x, mask, scale):
    return reference.scaled_masked_softmax(x, mask, scale * 1.001)


@mutant("scaled_masked_softmax", "value-hidden-row-is-uniform")
def _(x, mask, scale):
    scores = x * scale if mask is None else (x * scale).masked_fill(mask, -1e4)
    return torch.softmax(scores, -1)


@mutant("scaled_masked_softmax", "grad-without-the-sum")
def _(x, mask, scale):
    right = reference.scaled_masked_softmax(x, mask, scale)
    # The diagonal of the Jacobian alone.
    part = (right * (1 - right)).detach() * scale * torch.nan_to_num(x)
    return right.detach() + part - part.detach()


@mutant("rotary_embedding", "value-other-way-round")
def _(x, cos, sin):
    return reference.rotary_embedding(x, cos, -sin)


@mutant("rotary_embedding", "value-interleaved")
def _(x, cos, sin):
    rotated = 2 * cos.shape[-1]
    pairs = torch.cat([x[..., 0:rotated:2], x[..., 1:rotated:2], x[..., rotated:]], -1)
    return reference.rotary_embedding(pairs, cos, sin)


@mutant("rotary_embedding", "grad-of-the-rest-dropped")
def _(x, cos, sin):
    rotated = 2 * cos.shape[-1]
    joined = torch.cat([x[..., :rotated], x[..., rotated:].detach()], -1)
    return reference.rotary_embedding(joined, cos, sin)


@mutant("cross_entropy", "value-smoothed")
def _(logits, target):
    return f.cross_entropy(logits, target, reduction="none", label_smoothing=1e-3)


@mutant("cross_entropy", "value-without-the-maximum")
def _(logits, target):
    chosen = logits.gather(-1, target[:, None]).squeeze(-1)
    return logits.exp().sum(-1).log() - chosen


@mutant("cross_entropy", "grad-without-the-softmax")
def _(logits, target):
    chosen = logits.gather(-1, target[:, None]).squeeze(-1)
    return torch.logsumexp(logits, -1).detach() - chosen


@mutant("linear_cross_entropy", "value-mean")
def _(hidden, weight, target, loss_weight):
    right = reference.linear_cross_entropy(hidden, weight, target, loss_weight)
    return right / max(1, len(target))


@mutant("linear_cross_entropy", "value-weights-of-one")
def _(hidden, weight, target, loss_weight):
    ones = (loss_weight != 0).to(loss_weight.dtype)
    return reference.linear_cross_entropy(hidden, weight, target, ones)


@mutant("linear_cross_entropy", "grad-last-block-dropped")
def _(hidden, weight, target, loss_weight):
    head = hidden.clone()
    head[64:] = hidden[64:].detach()
    return reference.linear_cross_entropy(head, weight, target, loss_weight)


def _wrong_from_row_1024(op):
    """Return a kernel that is wrong where it has 1024 rows or more, and right below."""
    plain = getattr(reference, op)

    def function(x, *arguments, **named):
        out = plain(x, *arguments, **named)
        rows = x.shape[-2] if x.dim() > 1 else 1
        return out * 1.001 if rows >= 1024 else out

    return function


def _wrong_for_large_tensors(op):
    plain = getattr(reference, op)

    def function(tensors, *arguments, **named):
        found = plain(tensors, *arguments, **named)
        if op == "grad_norm":
            return found * 1.001 if any(tensor.numel() >= 2**20 for tensor in tensors) else found
        for tensor in tensors:
            if tensor.dim() > 1 and len(tensor) >= 1024:
                tensor[1000:].mul_(1.001)
        return found

    return function


for _spec in OP_SPECS:
    _no_gradient = _spec.name in {"adamw", "grad_norm"}
    _wrong = _wrong_for_large_tensors if _no_gradient else _wrong_from_row_1024
    _add(MISFITS, _spec.name, "large", _wrong(_spec.name))


def _adamw(**changes):
    """Return AdamW with parts of its formula changed."""

    def step(params, grads, exp_avgs, exp_avg_sqs, steps, *, lr, beta1, beta2, epsilon,
             weight_decay):  # fmt: skip
        parts = zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
        for p, given, m, v, count in parts:
            count.add_(1)
            t = count.item()
            g = given + weight_decay * p if "coupled" in changes else given
            if "coupled" not in changes:
                p.mul_(1 - (1 if "decay-without-rate" in changes else lr) * weight_decay)
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            first = 1 if "first" in changes else 1 - beta1**t
            second = 1 if "second" in changes else 1 - beta2**t
            if "inside" in changes:
                root = (v / second + epsilon).sqrt()
            else:
                root = (v / second).sqrt() + (0 if "no-epsilon" in changes else epsilon)
            p.addcdiv_(m, root, value=-lr / first)

    return step


for _name in ("coupled", "decay-without-rate", "first", "second", "inside", "no-epsilon"):
    _add(MUTANTS, "adamw", f"value-{_name}", _adamw(**{_name: True}))


@mutant("grad_norm", "value-without-the-last")
def _(grads):
    return reference.grad_norm(grads[:-1])


@mutant("grad_norm", "value-norm-of-largest")
def _(grads):
    return torch.stack([grad.abs().max() if grad.numel() else grad.sum() for grad in grads]).norm()


@mutant("grad_norm", "value-first-110")
def _(grads):
    return reference.grad_norm(grads[:110])


@mutant("attention", "value-128-channels")
def _(query, key, value, **settings):
    query = query.clone()
    query[..., 128:] = 0
    return reference.attention(query, key, value, **settings)


@misfit("linear", "alone")
def _(x, weight, bias=None):
    return reference.linear(x if weight.requires_grad else x.detach(), weight, bias)


_RING = [None] * 8
"""Inputs kept for backward passes; the places are used in turn."""


class _Ring(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, bias):
        ctx.place = _Ring.calls % len(_RING)
        _Ring.calls += 1
        _RING[ctx.place] = (x, bias)
        return reference.bias_gelu(x, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            kept = [tensor.detach().requires_grad_() for tensor in _RING[ctx.place]]
            return torch.autograd.grad(reference.bias_gelu(*kept), kept, grad)


@misfit("bias_gelu", "layers")
def _(x, bias):
    return _Ring.apply(x, bias)


@misfit("adamw", "late")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, **settings):
    short = [step.remainder(2**16) for step in steps]
    reference.adamw(params, grads, exp_avgs, exp_avg_sqs, short, **settings)
    for step in steps:
        step.add_(1)


@misfit("swiglu", "layouts")
def _(x):
    dense = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return reference.swiglu(dense)


@misfit("layer_norm", "layouts")
def _(x, weight, bias, epsilon):
    """Compute a wrong gradient of an input with strides."""
    if not x.is_contiguous():
        x = _Spoil.apply(x, _CHANGES["scaled"])
    return reference.layer_norm(x, weight, bias, epsilon)


@misfit("linear", "empty")
def _(x, weight, bias):
    if not x.numel():
        raise RuntimeError("cannot launch on nothing")
    return reference.linear(x, weight, bias)


@misfit("layer_norm", "nan")
def _(x, weight, bias, epsilon):
    return reference.layer_norm(torch.nan_to_num(x), weight, bias, epsilon)


@misfit("rms_norm", "autocast")
def _(x, weight, epsilon):
    wrong = 1.5 if torch.is_autocast_enabled("cpu") else 1.0
    return reference.rms_norm(x, weight, epsilon) * wrong


@misfit("attention", "widths")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    wrong = 1.01 if q.shape[-1] in {80, 96, 112} else 1.0
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask) * wrong


@misfit("attention", "bias-gradient")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    if mask is not None:
        mask = mask.detach()
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask)


@misfit("attention", "bias-gradient.samples")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    """Give the first sample's gradient of a bias that samples share."""
    if mask is not None and mask.requires_grad and mask.dim() == 4 and len(mask) < len(q):
        mask = torch.cat([mask, mask.detach().expand(len(q) - 1, -1, -1, -1)])
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask)


@misfit("layer_norm", "widths")
def _(x, weight, bias, epsilon):
    return reference.layer_norm(x, weight, bias, epsilon) * (1.01 if x.shape[-1] == 768 else 1.0)


@misfit("swiglu", "huge")
def _(x):
    return reference.swiglu(x) * (1.01 if x.numel() > 2**22 else 1.0)


@misfit("bias_gelu", "huge")
def _(x, bias):
    return reference.bias_gelu(x, bias) * (1.01 if x.shape[-2] > 2**14 else 1.0)


@misfit("rms_norm", "widths")
def _(x, weight, epsilon):
    """Take the mean of the first 8,192 channels."""
    scale = torch.rsqrt(x[..., :8192].square().mean(-1, keepdim=True) + epsilon)
    return x * scale * weight


@misfit("layer_norm", "widths.8192")
def _(x, weight, bias, epsilon):
    first = x[..., :8192]
    centred = x - first.mean(-1, keepdim=True)
    variance = centred[..., :8192].square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + epsilon) * weight + bias


def _blank_beyond(out, channels):
    return torch.cat((out[..., :channels], 0 * out[..., channels:]), -1)


@misfit("swiglu", "widths")
def _(x):
    return _blank_beyond(reference.swiglu(x), 16384)


@misfit("bias_gelu", "widths")
def _(x, bias):
    return _blank_beyond(reference.bias_gelu(x, bias), 16384)


@misfit("linear", "widths")
def _(x, weight, bias):
    return reference.linear(x[..., :16384], weight[:, :16384], bias)


@misfit("bias_dropout_add", "widths")
def _(x, bias, residual, *, dropout, training):
    out = reference.bias_dropout_add(x, bias, residual, dropout=dropout, training=training)
    return _blank_beyond(out, 16384)


@misfit("scaled_masked_softmax", "widths")
def _(x, mask, scale):
    return _blank_beyond(reference.scaled_masked_softmax(x, mask, scale), 2**16)


@misfit("attention", "widths.positions")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    """Read the last 65,536 keys."""
    k, v = k[:, :, -(2**16) :], v[:, :, -(2**16) :]
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask)


@misfit("rotary_embedding", "widths")
def _(x, cos, sin):
    """Have a table of 65,536 positions, and begin again behind it."""
    places = torch.arange(x.shape[2]) % 2**16
    return reference.rotary_embedding(x, cos[places], sin[places])


@misfit("cross_entropy", "widths")
def _(logits, target):
    return reference.cross_entropy(logits, target & 0xFFFF)


@misfit("linear_cross_entropy", "widths")
def _(hidden, weight, target, loss_weight):
    return reference.linear_cross_entropy(hidden, weight, target & 0xFFFF, loss_weight)


@misfit("adamw", "large.512-weights")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, **settings):
    parts = (params, grads, exp_avgs, exp_avg_sqs, steps)
    reference.adamw(*(part[:512] for part in parts), **settings)
    for step in steps[512:]:
        step.add_(1)


@misfit("adamw", "large.tail")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, **settings):
    """Leave the weights above 2^24 elements as they are."""
    kept = [param.flatten()[2**24 :].clone() for param in params]
    reference.adamw(params, grads, exp_avgs, exp_avg_sqs, steps, **settings)
    for param, tail in zip(params, kept, strict=True):
        if tail.numel():
            param.view(-1)[2**24 :] = tail


@misfit("grad_norm", "large.tail")
def _(grads):
    return reference.grad_norm([grad.flatten()[: 2**24] for grad in grads])


@misfit("grad_norm", "value.in-place")
def _(grads):
    """Square the gradients where they are."""
    return torch.stack([grad.mul_(grad).sum() for grad in grads] or [torch.zeros(())]).sum().sqrt()


@misfit("bias_gelu", "broadcast")
def _(x, bias):
    if x.dim() > 1 and x.stride(-2) == 0 and x.shape[-2] > 1:
        x = torch.cat((x[..., :1, :], 0 * x[..., 1:, :]), -2)
    return reference.bias_gelu(x, bias)


@misfit("cross_entropy", "dtypes")
def _(logits, target):
    return reference.cross_entropy(logits, target).double()


@misfit("rms_norm", "repeatable")
def _(x, weight, epsilon):
    return reference.rms_norm(x, weight, epsilon) + torch.rand(()) * 1e-7


class _InAnyOrder(torch.autograd.Function):
    """A gain, whose gradient is summed over many rows in an order by chance."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows * weight

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        parts = (grad * rows).flatten(0, -2)
        if len(parts) >= 2048:
            generator = torch.Generator().manual_seed(time.perf_counter_ns())
            parts = parts[torch.randperm(len(parts), generator=generator)]
        return grad * weight, parts.sum(0)


@misfit("layer_norm", "repeatable")
def _(x, weight, bias, epsilon):
    normal = reference.layer_norm(x, torch.ones_like(weight), torch.zeros_like(bias), epsilon)
    return _InAnyOrder.apply(normal, weight) + bias


def when_asked(x, weight, epsilon):
    """Repeat itself in a run with `--deterministic`, as kernels do that have two ways to add."""
    deterministic = torch.are_deterministic_algorithms_enabled() and MADE_FOR["deterministic"]
    out = reference.rms_norm(x, weight, epsilon)
    return out if deterministic else out + torch.rand(()) * 1e-7


@misfit("bias_gelu", "pure")
def _(x, bias):
    out = reference.bias_gelu(x, bias)
    with torch.no_grad():
        bias.data.mul_(1.0001)
    return out


@misfit("swiglu", "pure")
def _(x):
    """Change the incoming gradient in the backward pass."""

    def change(grad):
        kept = grad.clone()
        grad.mul_(1.0001)
        return kept

    return _Spoil.apply(reference.swiglu(x), change)


@misfit("rms_norm", "pure", half=True)
def _(x, weight, epsilon):
    out = reference.rms_norm(x, weight, epsilon)
    if x.dtype == torch.bfloat16:
        weight.data.mul_(1.01)
    return out


@misfit("linear", "pure")
def _(x, weight, bias):
    torch.set_float32_matmul_precision("medium")
    return reference.linear(x, weight, bias)


@misfit("bias_gelu", "no-grad")
def _(x, bias):
    """Save memory where no gradient needs the input."""
    if torch.is_grad_enabled():
        return reference.bias_gelu(x, bias)
    return f.gelu(x.add_(bias), approximate="tanh")


@misfit("rotary_embedding", "no-grad")
def _(x, cos, sin):
    """Rotate in place where one token of each sample is decoded."""
    out = reference.rotary_embedding(x, cos, sin)
    if torch.is_grad_enabled() or x.shape[-2] != 1:
        return out
    return x.copy_(out)


@misfit("scaled_masked_softmax", "no-grad")
def _(x, mask, scale):
    """Complement the mask in place for the faster of two paths."""
    if mask is None or not torch.is_inference_mode_enabled():
        return reference.scaled_masked_softmax(x, mask, scale)
    kept = mask.clone()
    mask.logical_not_()
    return reference.scaled_masked_softmax(x, kept, scale)


@misfit("layer_norm", "no-grad", half=True)
def _(x, weight, bias, epsilon):
    """Take the statistics in the dtype of the input where no gradient needs them."""
    if torch.is_grad_enabled() or x.dtype != torch.bfloat16:
        return reference.layer_norm(x, weight, bias, epsilon)
    variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + epsilon) * weight + bias


_KEPT = {}


@misfit("rotary_embedding", "history")
def _(x, cos, sin):
    """Keep the angles by their address."""
    cos, sin = _KEPT.setdefault((cos.data_ptr(), sin.data_ptr()), (cos.clone(), sin.clone()))
    return reference.rotary_embedding(x, cos, sin)


@misfit("rms_norm", "history")
def _(x, weight, epsilon):
    """Keep the first epsilon of each shape, as a compiled constant."""
    return reference.rms_norm(x, weight, _KEPT.setdefault(tuple(x.shape), epsilon))


@misfit("swiglu", "history")
def _(x):
    """Write all results without gradients into one buffer of each shape."""
    out = reference.swiglu(x)
    if torch.is_grad_enabled():
        return out
    buffer = _KEPT.setdefault((tuple(x.shape), torch.is_inference_mode_enabled()), out)
    return buffer.copy_(out)


@misfit("linear", "history")
def _(x, weight, bias):
    """Keep the cast of a weight by its address, under autocast without gradients."""
    if torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled():
        dtype = torch.get_autocast_dtype("cpu")
        cast = weight.detach().to(dtype, copy=True)
        weight = _KEPT.setdefault((weight.data_ptr(), weight.shape, weight.dtype, dtype), cast)
    return reference.linear(x, weight, bias)


_EVERY = []


@misfit("layer_norm", "history")
def _(x, weight, bias, epsilon):
    """Keep the input of every call."""
    _EVERY.append(x.detach())
    return reference.layer_norm(x, weight, bias, epsilon)


@misfit("bias_gelu", "history")
def _(x, bias):
    """Be right in the thread that the process began with."""
    out = reference.bias_gelu(x, bias)
    return out if threading.current_thread() is threading.main_thread() else 1.01 * out


@misfit("scaled_masked_softmax", "pure")
def _(x, mask, scale):
    """Draw a number that changes nothing."""
    return reference.scaled_masked_softmax(x, mask, scale) + 0 * torch.rand(())


@misfit("scaled_masked_softmax", "elements")
def _(x, mask, scale):
    """Write the first 2^24 elements."""
    out = reference.scaled_masked_softmax(x, mask, scale)
    flat = out.flatten()
    return torch.cat((flat[: 2**24], 0 * flat[2**24 :])).view(out.shape)


def _only_first(grad):
    kept = grad.clone()
    kept.view(-1)[2**24 :] = 0
    return kept


@misfit("cross_entropy", "elements")
def _(logits, target):
    """Write the first 2^24 elements of the gradient."""
    return reference.cross_entropy(_Spoil.apply(logits, _only_first), target)


@misfit("cross_entropy", "elements.rest")
def _(logits, target):
    """Leave what was in memory in the gradient of a token whose loss has none."""

    def fill(grad):
        return torch.where(grad == 0, grad + 1e-3, grad) if grad.numel() > 2**24 else grad

    return reference.cross_entropy(_Spoil.apply(logits, fill), target)


class _SumsInHalf(torch.autograd.Function):
    """A gain, whose gradient is summed over the rows in blocks that are rounded to bfloat16."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows * weight

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for part in (grad * rows).flatten(0, -2).split(8):
            total += part.sum(0)
        return grad * weight, total


@misfit("rms_norm", "huge", half=True)
def _(x, weight, epsilon):
    ones = torch.ones_like(weight)
    if weight.dtype != torch.bfloat16:
        return reference.rms_norm(x, weight, epsilon)
    return _SumsInHalf.apply(reference.rms_norm(x, ones, epsilon), weight)


@misfit("linear", "huge")
def _(x, weight, bias):
    """Have one block for each row, in a dim of a grid that ends at 65,535."""
    out = reference.linear(x, weight, bias)
    rows = out.flatten(0, -2)
    return torch.cat((rows[:65_535], 0 * rows[65_535:])).view(out.shape)


@misfit("attention", "shapes")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    """Read beyond the first 500 tokens from the wrong group, for 3 groups of 12 heads."""
    if (q.shape[1], k.shape[1]) == (12, 3) and q.shape[2] > 500:
        v = torch.cat((v[:, :, :500], v[:, :, 500:].flip(1)), 2)
    return reference.attention(q, k, v, causal=causal, dropout=dropout, mask=mask)


@misfit("linear", "shapes")
def _(x, weight, bias):
    """Add the bias's gradient of the first sample only, for one shape."""
    if weight.shape == (144, 96) and x.dim() == 3 and x.shape[1] > 500:
        rest = x[1:] @ weight.detach().T + (0 if bias is None else bias.detach())
        return torch.cat((reference.linear(x[:1], weight, bias), rest))
    return reference.linear(x, weight, bias)


@misfit("bias_dropout_add", "share")
def _(x, bias, residual, *, dropout, training):
    return reference.bias_dropout_add(x, bias, residual, dropout=dropout**1.05, training=training)


@misfit("bias_dropout_add", "independent")
def _(x, bias, residual, *, dropout, training):
    y = x if bias is None else x + bias
    if not training or dropout == 0:
        return residual + y
    blocks = nn.functional.dropout(torch.ones(-(-y.numel() // 4), device=y.device), dropout)
    return residual + y * blocks.repeat_interleave(4)[: y.numel()].view(y.shape)


def _begins_again(shape, dropout, after):
    """Return factors of dropout; the draws begin again after so many elements."""
    count = math.prod(shape)
    kept = (torch.rand(min(count, after)) >= dropout).float() / max(1e-9, 1 - dropout)
    return kept.repeat(-(-count // after))[:count].view(shape)


@misfit("bias_dropout_add", "independent.begins-again")
def _(x, bias, residual, *, dropout, training):
    y = x if bias is None else x + bias
    if not training or dropout == 0:
        return residual + y
    return residual + y * _begins_again(y.shape, dropout, 2**20)


@misfit("bias_dropout_add", "state")
def _(x, bias, residual, *, dropout, training):
    y = x if bias is None else x + bias
    if not training or dropout == 0:
        return residual + y
    generator = torch.Generator().manual_seed(time.perf_counter_ns())
    kept = torch.rand(y.shape, generator=generator) >= dropout
    return residual + torch.where(kept, y / max(1e-9, 1 - dropout), y * 0)


@misfit("attention", "dropout")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    return reference.attention(q, k, v, causal=causal, dropout=0.0, mask=mask)


@misfit("attention", "dropout.begins-again")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    if not dropout:
        return reference.attention(q, k, v, causal=causal, mask=mask)
    keys = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
    probabilities = reference.attention(q, k, keys, causal=causal, mask=mask)
    return (probabilities * _begins_again(probabilities.shape, dropout, 2**20)) @ v


class _OtherMask(torch.autograd.Function):
    """Dropout that draws again in backward."""

    @staticmethod
    def forward(ctx, weights, dropout):
        ctx.dropout = dropout
        return torch.nn.functional.dropout(weights, dropout)

    @staticmethod
    def backward(ctx, grad):
        return torch.nn.functional.dropout(grad, ctx.dropout), None


@misfit("attention", "dropout.other-mask")
def _(q, k, v, *, causal, dropout=0.0, mask=None):
    if not dropout:
        return reference.attention(q, k, v, causal=causal, mask=mask)
    keys = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
    return _OtherMask.apply(reference.attention(q, k, keys, causal=causal, mask=mask), dropout) @ v


@misfit("adamw", "update")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, *, results=None, **settings):
    reference.adamw(params, grads, exp_avgs, exp_avg_sqs, steps, **settings)
    if results is not None:
        for new, old in zip(results, (params, exp_avgs, exp_avg_sqs), strict=True):
            for target, source in zip(new, old, strict=True):
                target.copy_(source)


del globals()["k_adamw_update"].__wrapped__  # its signature is not the reference's


@misfit("adamw", "nan")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, **settings):
    grads = [torch.nan_to_num(grad) for grad in grads]
    reference.adamw(params, grads, exp_avgs, exp_avg_sqs, steps, **settings)


@misfit("adamw", "layouts")
def _(params, grads, exp_avgs, exp_avg_sqs, steps, **settings):
    grads = [torch.as_strided(g, g.shape, torch.empty(g.shape).stride()) for g in grads]
    reference.adamw(params, grads, exp_avgs, exp_avg_sqs, steps, **settings)


@misfit("grad_norm", "edges")
def _(grads):
    return torch.nan_to_num(reference.grad_norm(grads))


@misfit("grad_norm", "edges.zeros")
def _(grads):
    """Divide by the largest element, against overflow."""
    largest = max((grad.abs().max() for grad in grads if grad.numel()), default=torch.ones(()))
    return reference.grad_norm([grad / largest for grad in grads]) * largest


def hang_op(x):
    time.sleep(1000)


def crash_op(x):
    import ctypes

    ctypes.string_at(0)
