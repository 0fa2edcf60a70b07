"""Level 1: the device exists, holds tensors, and computes in the dtypes that it claims."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.contract import OP_SPECS
from lmcore_conformance.registry import Failure, check, conclude
from lmcore_conformance.requirements import REQUIREMENTS

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="device")

_LINEAR = next(spec for spec in OP_SPECS if spec.name == "linear")
_STORED = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


@_check(
    "device.create",
    "The device can be created, has the type that its probe promised, and can be described.",
    reason="Every run creates it, and `environment.json` contains the description.",
    group="create",
    seconds=120,
)
def create(bench: Bench) -> str:
    """Create it, use its plain functions, and add two numbers on it."""
    device = bench.device
    described = device.describe()
    if json.loads(json.dumps(described)) != described:
        raise Failure("its `facts` or `missing` are no JSON values")
    if not device.name.strip():
        raise Failure("its `name` is empty")
    total = torch.ones(3, device=bench.torch_device) + torch.ones(3, device=bench.torch_device)
    device.synchronize()
    if total.device.type != device.type or total.tolist() != [2.0, 2.0, 2.0]:
        raise Failure(f"1 + 1 on `{bench.torch_device}` is {total.tolist()} on `{total.device}`")
    return f"{device.name}: {', '.join(sorted(device.dtypes))}"


@_check(
    "device.current",
    "After `set_current`, torch's current device has the index of the record, and new tensors, "
    "streams and events are on it.",
    reason="Each process of a run uses the device of its local rank.",
)
def current(bench: Bench) -> str:
    """Compare the indices that torch names with the record's."""
    device = bench.device
    if bench.is_host:
        return "the host has no index"
    device.set_current()
    found: dict[str, Any] = {
        f"`torch.empty(1, device={device.type!r})`": torch.empty(1, device=device.type).device
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        index = torch.accelerator.current_device_index()
        found["`torch.accelerator.current_device_index()`"] = torch.device(device.type, index)
        if device.new_stream is not None:
            stream = torch.accelerator.current_stream()
            found["`torch.accelerator.current_stream()`"] = stream.device
    if device.new_stream is not None:
        stream = device.new_stream()
        found["`new_stream()`"] = getattr(stream, "device", None)
        if device.new_event is not None:
            event = device.new_event()
            event.record(stream)
            found["a recorded `new_event()`"] = getattr(event, "device", None)
    faults = [
        f"{name} is on `{device}`, and the device of this process is `{bench.torch_device}`"
        for name, device in found.items()
        if device is not None and torch.device(device) != bench.torch_device
    ]
    return conclude(faults, f"`{bench.torch_device}`")


@_check(
    "device.declaration",
    "The device does not offer an ability declared as closed, a run that asks for the ability is "
    "refused, and each missing ability has a reason.",
    reason="`lmcore doctor` and errors show the reasons; an ability declared as closed would be "
    "used without a check.",
)
def declaration(bench: Bench) -> str:
    """Compare the declaration and the reasons in `missing` with the device's record."""
    faults = [
        f"`{name}` has no reason in words"
        for name, reason in bench.device.missing.items()
        if len(reason.split()) < 2
    ]
    closed = {name: REQUIREMENTS[name] for name in REQUIREMENTS if name in bench.closed}
    wrong = (one.why_wrongly_closed(name, bench) for name, one in closed.items())
    faults += [fault for fault in wrong if fault is not None]
    faults += [
        f"`Device.dtypes` has `{name}`, which torch lacks"
        for name in sorted(bench.device.dtypes)
        if not isinstance(getattr(torch, name, None), torch.dtype)
    ]
    return conclude(faults, counted(len(bench.device.missing), "reason"))


@_check(
    "device.offers-twice",
    "The plugin offers the same kernels, policies, stagers and backends in each call.",
    reason="All ranks of a run, and a resumed run, select them by name.",
)
def offers_twice(bench: Bench) -> str:
    """Compare names of two rounds of offers."""
    from lmcore import plugin as contract

    arguments = (bench.plugins, bench.selection, bench.device)
    counts = []
    for kind, collect in {
        ("kernel", "kernels"): contract.op_impls,
        ("precision policy", "precision policies"): contract.precision_policies,
        ("recompute policy", "recompute policies"): contract.recompute_policies,
        ("checkpoint stager", "checkpoint stagers"): contract.checkpoint_stagers,
        ("communication backend", "communication backends"): contract.comm_backends,
    }.items():
        first, second = ([_name(offer) for offer in collect(*arguments)] for _ in range(2))
        if first != second:
            raise Failure(f"{kind[1]}: first {first}, then {second}")
        counts.append(counted(len(first), *kind))
    return ", ".join(counts)


def _name(offer: object) -> str:
    kernel = getattr(offer, "op", "")
    return f"{kernel}={getattr(offer, 'id', '')}" if kernel else str(getattr(offer, "name", ""))


@_check(
    "device.transfer",
    "Tensors are equal bit for bit after a copy to the device and back: all dtypes, strides, "
    "empty tensors, views.",
    reason="Batches, weights and checkpoints are copied this way.",
)
def transfer(bench: Bench) -> str:
    """Send tensors of all dtypes and layouts there and back."""
    faults = []
    for dtype in (*_STORED, *(torch.float64,) * ("float64" in bench.device.dtypes)):
        base = (bench.values(5, 7) * 50).to(dtype)
        layouts = {
            "contiguous": base,
            "transposed": base.t(),
            "every second column": base[:, ::2],
            "a view behind the first row": base[1:],
            "empty": base[:0],
            "a scalar": base[2, 3],
            "large": base.repeat(300, 41),
        }
        for layout, tensor in layouts.items():
            sent = tensor.to(bench.torch_device)
            back = sent.to("cpu")
            bench.device.synchronize()
            if sent.device.type != bench.device.type or back.dtype != dtype:
                faults.append(f"{dtype}, {layout}: it is {back.dtype} on `{sent.device}`")
            elif not torch.equal(back, tensor):
                faults.append(f"{dtype}, {layout}: other numbers come back")
    return conclude(faults, f"{len(_STORED)} dtypes")


@_check(
    "device.copies",
    "Copies on the device have the same values: clones, strided copies, casts, concatenations.",
    reason="Optimizers, checkpoints and views depend on them.",
)
def copies(bench: Bench) -> str:
    """Copy in several ways and compare with the host."""
    base = bench.values(6, 8).float()
    on_device = base.to(bench.torch_device)
    found = {
        "clone": (on_device.t().clone(), base.t()),
        "contiguous": (on_device[:, 1::3].contiguous(), base[:, 1::3]),
        "cast to int64": (on_device.mul(100).to(torch.int64), base.mul(100).to(torch.int64)),
        "copy_ into a strided view": (
            torch.zeros(8, 6, device=bench.torch_device).t().copy_(on_device),
            base,
        ),
        "cat": (torch.cat([on_device, on_device[:2]]), torch.cat([base, base[:2]])),
        "index": (
            on_device[torch.tensor([3, 0, 3], device=bench.torch_device)],
            base[torch.tensor([3, 0, 3])],
        ),
        "fill": (torch.empty(3, 3, device=bench.torch_device).fill_(2.5), torch.full((3, 3), 2.5)),
    }
    bench.device.synchronize()
    pairs = found.items()
    faults = [f"{name}: other numbers" for name, (a, b) in pairs if not torch.equal(a.cpu(), b)]
    return conclude(faults, ", ".join(found))


def _product(bench: Bench, name: str) -> str:
    """Compare products in a dtype, forward and backward, with float64 on the host."""
    if name not in bench.device.dtypes:
        # A declaration that it depends on the hardware turns this into a declared gap.
        raise Failure(f"`Device.dtypes` has no `{name}`, and there is no reason")
    dtype = getattr(torch, name)
    allowed = _LINEAR.tolerances[name]
    worst = 0.0
    for rows, inner, columns in ((33, 65, 17), (128, 256, 64), (1, 7, 3)):
        left, right, grad = (
            bench.values(*shape, seed=seed).to(dtype)
            for seed, shape in enumerate(((rows, inner), (inner, columns), (rows, columns)))
        )
        x, w = (tensor.to(bench.torch_device).requires_grad_() for tensor in (left, right))
        out = x @ w
        grads = torch.autograd.grad(out, (x, w), grad.to(bench.torch_device))
        wide = [tensor.double() for tensor in (left, right, grad)]
        right_ones = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
        for tensors, computed, exact in zip(
            ("products", "gradients", "gradients"), (out, *grads), right_ones, strict=True
        ):
            if computed.dtype != dtype:
                raise Failure(f"{tensors} of {name} are {computed.dtype}")
            error = (bench.host(computed) - exact).abs()
            scale = max(1.0, exact.abs().max().item())
            limit = allowed.absolute * scale + allowed.relative * exact.abs()
            share = (error / limit).max().item()
            if not share <= 1:
                raise Failure(
                    f"{tensors} of {rows} x {inner} by {inner} x {columns} are off by "
                    f"{error.max().item():.1e}, {share:.1f} times what is allowed"
                )
            worst = max(worst, share)
    return f"largest error {worst:.0%} of what is allowed"


def _dtype_check(name: str, requires: tuple[str, ...]) -> None:
    def run(bench: Bench) -> str:
        return _product(bench, name)

    _check(
        f"device.dtype.{name}",
        f"Matrix products in {name} are right, forward and backward, against float64 on the host.",
        reason="`Device.dtypes` claims it, and precision policies depend on the claim.",
        requires=requires,
    )(run)


for _name_of_dtype in ("float32", "float64", "bfloat16", "float16"):
    _dtype_check(_name_of_dtype, (_name_of_dtype,) if _name_of_dtype in REQUIREMENTS else ())


@_check(
    "device.peak-flops",
    "`peak_flops` gives a plausible rate in FLOP/s, or None, for each dtype, and None for an "
    "unknown dtype.",
    reason="The utilisation (MFU) of a run is relative to it.",
    requires=["peak_flops"],
)
def peak_flops(bench: Bench) -> str:
    """Compute in all dtypes of the device."""
    ask = bench.device.require("peak_flops")
    rates = {name: ask(name) for name in sorted(bench.device.dtypes)}
    bad = [
        f"{name}: {rate!r:.40}; a rate in FLOP/s is between 1e7 and 1e19"
        for name, rate in rates.items()
        if rate is not None and not (isinstance(rate, int | float) and 1e7 < rate < 1e19)
    ]
    if ask("float3") is not None:
        bad.append("it gives a rate for the unknown dtype `float3`")
    if bad:
        raise Failure(*bad)
    return ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items() if rate)


@_check(
    "device.serialization",
    "`torch.save` and `torch.load` handle the device's tensors, also to and from the host.",
    reason="Checkpoints of other libraries are read this way.",
)
def serialization(bench: Bench) -> str:
    """Save there, load there and on the host."""
    import io

    tensor: Tensor = bench.values(4, 5).float().to(bench.torch_device)
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    faults = []
    for target in (bench.torch_device, torch.device("cpu")):
        file.seek(0)
        found = torch.load(file, map_location=target, weights_only=True)["weight"]
        if found.device.type != target.type:
            faults.append(f"loaded for `{target}`, it is on `{found.device}`")
        elif not torch.equal(found.cpu(), tensor.cpu()):
            faults.append(f"loaded for `{target}`, it has other numbers")
    return conclude(faults, "both ways")
