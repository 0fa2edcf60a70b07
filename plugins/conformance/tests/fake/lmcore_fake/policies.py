"""Stagers and recompute policies that are each wrong in one thing, all offered at once."""

import contextlib
import dataclasses

import torch

from lmcore.contract import (
    CheckpointStager,
    PendingCopy,
    RecomputePolicy,
    standard_recompute_policies,
)
from lmcore.contract.activation_saving import recompute


def stagers(device):
    if device.type != "cpu":
        return [CheckpointStager("hasty", hasty(), priority=50)]
    found = {"narrow": narrow, "in-pieces": in_pieces, "hoard": hoard()}
    once = CheckpointStager("once", copied, priority=50, begin=begin_once)
    return [*(CheckpointStager(name, stage, priority=50) for name, stage in found.items()), once]


def copied(tensors):
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def begin_once(tensors):
    """Give the copy's handle away in the first `finish`."""
    handles = [1]
    return PendingCopy(copied(tensors), finish=handles.pop)


def narrow(tensors):
    """Send float64 as float32."""
    return {
        name: live.float().double() if live.dtype == torch.float64 else live.detach().clone()
        for name, live in tensors.items()
    }


def in_pieces(tensors):
    """Copy the first piece alone."""
    copies = {name: live.detach().clone() for name, live in tensors.items()}
    for copy in copies.values():
        if copy.numel() > 2**20:
            copy[2**20 :] = 0
    return copies


def hoard():
    every = []

    def stage(tensors):
        every.append({name: live.detach().clone() for name, live in tensors.items()})
        return dict(every[-1])

    return stage


def hasty():
    """Return a function that copies to pinned memory, and does not wait for the device."""
    buffers = {}

    def stage(tensors):
        for name, live in tensors.items():
            if name not in buffers:
                buffers[name] = torch.empty(live.shape, dtype=live.dtype).pin_memory()
            buffers[name].copy_(live.detach(), non_blocking=True)
        return dict(buffers)

    return stage


def recomputes(device):
    plain = [policy for policy in standard_recompute_policies(device) if policy.name != "full"]
    (full,) = (policy for policy in standard_recompute_policies(device) if policy.name == "full")
    return [
        *plain,
        dataclasses.replace(full, block=keep),
        RecomputePolicy("ring", "keeps four states", ring()),
        RecomputePolicy("without-autocast", "forgets the precision", without_autocast(device.type)),
        RecomputePolicy("compressed", "keeps large activations in bfloat16", compressed),
        RecomputePolicy("input-alone", "is a function of its arguments", input_alone),
        RecomputePolicy("keeps-outputs", "keeps the output of every block", keeps_outputs()),
        RecomputePolicy("first-alone", "returns the first of several", first_alone),
        RecomputePolicy("if-drawn", "restores what was drawn", if_drawn(device)),
    ]


def in_a_model(device, fault):
    """Return the core's policies; `full` differs in a model and not in single blocks."""
    wrong = {"rounds-again": rounds_again, "forgets-draws": forgets_draws}[fault]

    def run(call, *tensors, remember):
        if tensors[0].ndim < 3 or not torch.is_grad_enabled():
            return recompute(call, *tensors, remember=remember)
        return wrong(call, *tensors, remember=remember)

    return [
        dataclasses.replace(policy, block=run) if policy.name == "full" else policy
        for policy in standard_recompute_policies(device)
    ]


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 1e-6)


def rounds_again(call, x, *tensors, remember):
    """Change the last bits of a gradient."""
    return recompute(call, _Rounding.apply(x), *tensors, remember=remember)


def forgets_draws(call, *tensors, remember):
    """Drop other elements when a block is repeated."""
    return recompute(call, *tensors, remember=lambda: contextlib.nullcontext)


def keep(call, *tensors, remember):
    """Compute nothing again."""
    return call(*tensors)


def ring():
    slots, count = [None] * 4, [0]

    def run(call, *tensors, remember):
        at = count[0] % len(slots)
        count[0] += 1

        def again():
            return slots[at]()

        def note():
            slots[at] = remember()
            return again

        return recompute(call, *tensors, remember=note)

    return run


def without_autocast(kind):
    """Repeat a block in float32, and widen and narrow what it keeps, so that nothing fails."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, again, *tensors):
            ctx.call, ctx.again = call, again
            ctx.save_for_backward(*tensors)
            with torch.no_grad():
                return call(*tensors)

        @staticmethod
        def backward(ctx, grad):
            inputs = [kept.detach().requires_grad_() for kept in ctx.saved_tensors]
            with ctx.again(), torch.enable_grad(), torch.autocast(kind, enabled=False):
                out = ctx.call(*inputs)
            torch.autograd.backward([out], [grad.to(out.dtype)])
            return None, None, *(kept.grad for kept in inputs)

    def run(call, *tensors, remember):
        if not torch.is_grad_enabled():
            return call(*tensors)
        return Again.apply(call, remember(), *tensors)

    return run


class _OfArguments(torch.autograd.Function):
    """A block whose backward pass is reached from its arguments alone."""

    @staticmethod
    def forward(ctx, call, again, *tensors):
        ctx.call, ctx.again = call, again
        ctx.save_for_backward(*tensors)
        return call(*tensors)

    @staticmethod
    def backward(ctx, grad):
        inputs = [kept.detach().requires_grad_(kept.requires_grad) for kept in ctx.saved_tensors]
        with torch.enable_grad(), ctx.again():
            out = ctx.call(*inputs)
        torch.autograd.backward(out, grad)
        return None, None, *(kept.grad for kept in inputs)


def input_alone(call, *tensors, remember):
    if not torch.is_grad_enabled():
        return call(*tensors)
    return _OfArguments.apply(call, remember(), *tensors)


def keeps_outputs():
    every = []

    def run(call, *tensors, remember):
        out = recompute(call, *tensors, remember=remember)
        every.append(out)
        return out

    return run


def first_alone(call, *tensors, remember):
    out = recompute(call, *tensors, remember=remember)
    return out[0] if isinstance(out, tuple) else out


def if_drawn(device):
    """Restore the state, and the precision with it, if the block drew random numbers."""

    def run(call, *tensors, remember):
        before, drew = device.get_rng_state().clone(), []

        def noting():
            again = remember()
            return lambda: again() if drew[0] else contextlib.nullcontext()

        out = recompute(call, *tensors, remember=noting)
        drew.append(not torch.equal(before, device.get_rng_state()))
        return out

    return run


def compressed(call, *tensors, remember):
    def pack(tensor):
        narrow = tensor.dtype == torch.float32 and tensor.nbytes > 2**23 and not tensor.is_leaf
        return (tensor.bfloat16() if narrow else tensor), narrow

    def unpack(kept):
        tensor, narrow = kept
        return tensor.float() if narrow else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return call(*tensors)
