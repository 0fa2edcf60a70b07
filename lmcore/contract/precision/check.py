"""Verification of a precision policy: the dtypes of the products that a device or model computes.

`ProductCounter` sees every matrix product: with and without bias, batched, in attention, in forward
and backward passes.

Shapes: B batch, S sequence, T tokens, I inputs, O outputs, P packed heads, N heads, D channels.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lmcore.base.errors import DeviceError
from lmcore.contract.device_errors import first_line
from lmcore.contract.dtype import dtype_name
from lmcore.contract.op.reference import attention
from lmcore.contract.precision.products import (
    HEAD,
    Product,
    ProductCounter,
    counted_products,
    in_words,
    is_wider,
)

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = [
    "check_device",
    "check_model",
    "check_products",
    "model_state",
    "module_kind",
    "projection_kinds",
    "weight_dtypes",
    "wide_attention",
    "without_gradients",
]


class _Policy(Protocol):
    """The part of a `PrecisionPolicy` that is verified; that class imports this module."""

    @property
    def name(self) -> str: ...
    @property
    def compute(self) -> str: ...
    @property
    def activations(self) -> str: ...
    @property
    def keep(self) -> str: ...
    @property
    def reduce(self) -> str: ...
    @property
    def context(self) -> Callable[[], AbstractContextManager[Any]]: ...
    @property
    def prepare(self) -> Callable[[nn.Module], None] | None: ...


_SIZE = 16  # rows and columns of the products; 8-bit formats take no fewer
_IN_MODEL = "in the model"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a weight: its hooks by number, or None; torch has no public names for them."""


def check_products(
    policy: _Policy,
    products: Counter[Product],
    device_type: str,
    *,
    place: str = _IN_MODEL,
    wide_attention: bool = False,
) -> Counter[Product]:
    """Check the dtypes of the products of a computation under a policy.

    The factors of a product must have the dtype that is computed in, or the dtype of its results.
    Products of two parts may be wider, as some kernels widen on purpose: of the head, since the
    loss is computed in float32; and of attention, if *wide_attention* is set or there is no
    autocast, which would narrow the reference of attention.

    Args:
        policy: Precision policy.
        products: Number of calls of each product.
        device_type: Device type that computed them.
        place: Place of the computation, for messages.
        wide_attention: True if products of attention may be wider.

    Returns:
        Products that are wider for these reasons.

    Raises:
        DeviceError: Other products have another dtype.
    """
    with policy.context():
        if not (
            torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
        ):
            wide_attention = True
    wider, wrong = Counter[Product](), Counter[Product]()
    for product, count in products.items():
        if all(_is_allowed(policy, dtype) for dtype in product.dtypes):
            continue
        widened = all(is_wider(dtype, policy.activations) for dtype in product.dtypes)
        may_widen = product.part == HEAD or (product.batched and wide_attention)
        (wider if widened and may_widen else wrong)[product] = count
    if not wrong:
        return wider
    reasons = []
    for dtype in sorted({product.dtype for product in wrong}):
        same = Counter({each: count for each, count in wrong.items() if each.dtype == dtype})
        part = f"{same.total()} of {products.total()} products are in {dtype}"
        reasons.append(f"{part}, not {policy.compute}: {in_words(same)}")
    raise _not_in_force(policy, place, "; ".join(reasons), op=_op_of(next(iter(wrong))))


def _is_allowed(policy: _Policy, dtype: str) -> bool:
    """Return True if products may have factors of *dtype*; 8-bit formats come in pairs."""
    if dtype in {policy.compute, policy.activations}:
        return True
    sizes = [getattr(getattr(torch, name, None), "itemsize", 0) for name in (dtype, policy.compute)]
    return sizes == [1, 1]


def check_device(policy: _Policy, device: Device) -> Counter[Product]:
    """Run small layers on a device, and check dtypes and numbers.

    Args:
        policy: Precision policy.
        device: Device that computes.

    Returns:
        Products that are wider than the policy's: the reference of attention may widen.

    Raises:
        DeviceError: Products, weights or gradients have another dtype, or wrong numbers; or the
            device cannot compute the layers.
    """
    try:
        return _checked_layers(policy, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeviceError(
            f"device `{device.type}` cannot compute small layers under precision `{policy.name}`",
            why=f"{type(error).__name__}: {first_line(error)}; projections and attention of a few "
            "numbers run on it before training, forward and backward",
            hint="report this to the authors of the device's plugin, or use another `--device`",
        ) from error


def _checked_layers(policy: _Policy, device: Device) -> Counter[Product]:
    """Return the wider products of small layers, whose dtypes and numbers are right."""
    place = f"on device `{device.type}`"
    _check_numbers(policy, device)
    layers = _layers(policy, device)
    dtype = next(layers.parameters()).dtype
    x_BSI = torch.ones(2, _SIZE, _SIZE, dtype=dtype, device=device.torch_device, requires_grad=True)

    def compute(counter: ProductCounter) -> None:
        with counter:
            with policy.context():
                out_BSO = layers(x_BSI)
            out_BSO.float().square().mean().backward()

    products = counted_products(compute, device.type)
    wider = check_products(policy, products, device.type, place=place)
    # A kernel that is no op of torch is not counted, so there may be no product in `compute`.
    plain = Counter({each: count for each, count in products.items() if not each.batched})
    if policy.compute != policy.activations and {policy.activations} == {
        dtype for product in plain for dtype in product.dtypes
    }:
        why = f"all products of projections are in {policy.activations}, not {policy.compute}"
        raise _not_in_force(policy, place, f"{why}: {in_words(plain)}")
    return wider


def _check_numbers(policy: _Policy, device: Device) -> None:
    """Run one projection on numbers whose products are exact in every dtype, and compare."""
    pattern = torch.arange(3 * _SIZE**2).remainder(7).remainder(3).sub(1.0)
    x_TI, weight_OI, grad_TO = pattern.view(3, _SIZE, _SIZE).double().unbind()
    linear = nn.Linear(_SIZE, _SIZE, bias=False, device=device.torch_device)
    with torch.no_grad():
        linear.weight.copy_(weight_OI)
    layer = nn.Sequential(linear)
    if policy.prepare is not None:
        policy.prepare(layer)
    (parameter,) = layer.parameters()
    _expect(policy, device, "weights", parameter, policy.keep, weight_OI)
    x = x_TI.to(device.torch_device, parameter.dtype).requires_grad_()
    with policy.context():
        out = layer(x)
    _expect(policy, device, "products", out, policy.activations, x_TI @ weight_OI.T)
    # A scalar: given gradients, torch imports a symbolic algebra to check them, half a second.
    (out * grad_TO.to(out.device, out.dtype)).sum().backward()
    gradients = {
        "gradients of weights": (parameter, policy.reduce, grad_TO.T @ x_TI),
        "gradients of inputs": (x, policy.keep, grad_TO @ weight_OI),
    }
    for name, (tensor, dtype, expected) in gradients.items():
        if tensor.grad is None:
            raise _not_in_force(policy, f"on device `{device.type}`", f"{name} do not exist")
        _expect(policy, device, name, tensor.grad, dtype, expected)


def _layers(policy: _Policy, device: Device) -> nn.Module:
    """Return a projection with bias, attention, and a projection without bias."""

    class Attention(nn.Module):
        def forward(self, packed_BSP: Tensor) -> Tensor:
            heads = packed_BSP.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            out_BNSD = attention(*heads.unbind(), causal=True)
            return out_BNSD.transpose(1, 2).flatten(2)

    on = device.torch_device
    layers = nn.Sequential(
        nn.Linear(_SIZE, 3 * _SIZE, device=on),
        Attention(),
        nn.Linear(_SIZE, _SIZE, bias=False, device=on),
    )
    if policy.prepare is not None:
        policy.prepare(layers)
    return layers


def _expect(
    policy: _Policy,
    device: Device,
    name: str,
    found: Tensor,
    dtype: str,
    expected: Tensor,
) -> None:
    if dtype_name(found.dtype) != dtype:
        place = f"on device `{device.type}`"
        why = f"{name} under it are {dtype_name(found.dtype)}, not {dtype}"
        raise _not_in_force(policy, place, why)
    values = found.detach().to("cpu", torch.float64)
    if not torch.allclose(values, expected, rtol=1e-2, atol=1e-2):
        worst = (values - expected).abs().argmax()
        raise DeviceError(
            f"precision `{policy.name}` computes wrong {name} on device `{device.type}`",
            why=f"one of them is {values.flatten()[worst]:g}, not "
            f"{expected.flatten()[worst]:g}; numbers this small are exact in {policy.compute}",
            hint="report this to the authors of the device's plugin, or try another `--precision`",
        )


def _op_of(product: Product) -> str:
    """Return the op of a model that computes a product."""
    if product.part == HEAD:
        return "linear_cross_entropy"
    return "attention" if product.batched else "linear"


def _not_in_force(policy: _Policy, place: str, why: str, *, op: str = "linear") -> DeviceError:
    other = "`--precision fp32`" if policy.name != "fp32" else "another `--precision`"
    hint = f"use {other}, or fix the device's support for {policy.compute}"
    if place == _IN_MODEL:
        hint = f"`lmcore ops explain {op}` shows the kernel; try `--ops {op}=reference`, or {other}"
    return DeviceError(f"precision `{policy.name}` is not applied {place}", why=why, hint=hint)


def check_model(policy: _Policy, model: nn.Module) -> None:
    """Check the dtype of every weight, and of the products of one projection of each kind.

    Projections on the meta device have no memory, and are left out.  Gradients stay as they are.

    Args:
        policy: Precision policy.
        model: Prepared model.

    Raises:
        DeviceError: A weight, or the product of a projection, has another dtype.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and dtype_name(parameter.dtype) != policy.keep:
            why = f"`{name}` is {dtype_name(parameter.dtype)}, not {policy.keep}"
            raise _not_in_force(policy, "in the model's weights", why)
    for projection in projection_kinds(model):
        if projection.weight.is_meta:
            continue
        rows = torch.zeros(
            _SIZE,
            projection.in_features,
            dtype=projection.weight.dtype,
            device=projection.weight.device,
            requires_grad=True,
        )
        found, products = _dtype_and_products(policy, projection, rows)
        if found != policy.activations:
            why = f"a projection gives {found}, not {policy.activations}; its kernel or a module "
            why += "put in its place computes in another dtype"
            raise _not_in_force(policy, _IN_MODEL, why)
        check_products(policy, products, rows.device.type)


def _dtype_and_products(
    policy: _Policy, projection: nn.Linear, rows: Tensor
) -> tuple[str, Counter[Product]]:
    """Run a projection forward and backward; return the dtype of its output, and its products."""
    found = ""

    def compute(counter: ProductCounter) -> None:
        nonlocal found
        with without_gradients(projection), counter:
            with policy.context():
                out = projection(rows)
            out.float().square().mean().backward()
        found = dtype_name(out.dtype)

    products = counted_products(compute, rows.device.type)
    return found, products


def wide_attention(policy: _Policy, device: Device) -> str:
    """Return the wider dtypes of the products of attention in small layers; empty if none is wider.

    Args:
        policy: Precision policy that is in force on the device.
        device: Device that computes.
    """
    with device.rng_tracker().preserved():
        wider = check_device(policy, device)
    return ", ".join(sorted({product.dtype for product in wider if product.batched}))


def weight_dtypes(model: nn.Module) -> set[str]:
    """Return the dtypes of a model's weights.

    Args:
        model: Any model.
    """
    return {dtype_name(parameter.dtype) for parameter in model.parameters()}


def model_state(model: nn.Module) -> list[tuple[object, ...]]:
    """Return a value that is equal as long as no module, hook, function or weight is exchanged.

    A weight that changes in place, to another dtype or value, is exchanged too.

    Args:
        model: Model, before and after a policy prepares it.
    """
    found: list[tuple[object, ...]] = []
    for name, module in model.named_modules():
        parts = {
            key: tuple(value) if isinstance(value, dict) else id(value)
            for key, value in vars(module).items()
            if key not in {"_parameters", "_buffers", "_modules"}
        }
        found.append((name, type(module), tuple(sorted(parts.items(), key=lambda pair: pair[0]))))
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        place = 0 if weight.is_meta else weight.data_ptr()
        version = weight._version  # noqa: SLF001 - torch has no public name for it
        hooks = [tuple(getattr(weight, kind, None) or ()) for kind in _HOOKS]
        found.append(
            (name, type(weight), weight.dtype, place, version, *hooks, *sorted(vars(weight)))
        )
    return found


@contextlib.contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Drop the gradients of a module for the context; restore them and its buffers afterwards.

    Args:
        module: Module that the context runs.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def module_kind(module: nn.Module) -> tuple[object, ...]:
    """Return a value that is equal for modules with equal parts, bound kernels and biases.

    Args:
        module: Module of a model.
    """
    return tuple(
        (name, type(part), *dict(part.named_parameters(recurse=False)), *_functions(part))
        for name, part in module.named_modules()
    )


def _functions(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the functions that a module keeps: its kernels, or another forward pass."""
    for name, value in sorted(vars(module).items()):
        if callable(value):
            function = getattr(value, "func", value)  # of `functools.partial`
            yield name, id(getattr(function, "__func__", function))


def projection_kinds(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the smallest projection of each kind.

    Args:
        model: Model with projections, or without.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    kinds: dict[object, nn.Linear] = {}
    for linear in sorted(linears, key=lambda module: module.weight.numel()):
        kinds.setdefault(module_kind(linear), linear)
    yield from kinds.values()
