"""Build a model, of any family, and the model of a run on its device.

Products of a model: one layer of each kind and the head, run on few tokens before training.

The layers are the run's own, with the kernels that it bound, and have the dtypes of a step.  The
cost does not grow with the number of layers or the vocabulary.

Shapes: S tokens, H hidden, R rows of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.base.errors import PluginError, suggestion
from lmcore.contract.op import reference
from lmcore.contract.precision.check import (
    check_products,
    module_kind,
    projection_kinds,
    without_gradients,
)
from lmcore.contract.precision.products import (
    HEAD,
    ModelProducts,
    ProductCounter,
    counted_products,
)
from lmcore.families.op_binding import OpBinding
from lmcore.families.protocol import Model
from lmcore.families.recompute import KEEP_ALL, Recompute, recompute_of
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.contract import Device
    from lmcore.model.shape import ModelPart, ModelShape
    from lmcore.runtime.runtime import Runtime


__all__ = [
    "apply_precision",
    "build_model",
    "create_model",
    "op_binding",
]

_TOKENS = 32
_ROWS = 512
"""Rows of the vocabulary in the head's products."""


def apply_precision(model: Model, runtime: Runtime) -> ModelProducts:
    """Prepare a built model by the run's precision policy, and check the dtypes of its products.

    A layer of each kind and the head run on few tokens.  Random states, gradients and buffers are
    restored.  No collective runs: the model must not be connected with other ranks yet.

    Args:
        model: Built model; parameters on the meta device get memory for the check only.
        runtime: Device, precision and random number streams.

    Raises:
        DeviceError: The precision policy has no effect in the model, or in some products.
        PluginError: The precision policy broke the model.
    """
    device, context = runtime.device.torch_device, runtime.precision.context
    layers = _layer_kinds(model)
    with _on_device(device, layers or list(projection_kinds(model))):
        runtime.precision.apply(model)
    if runtime.precision.prepare is not None:  # it may have exchanged modules
        layers = _layer_kinds(model)

    def compute(counter: ProductCounter) -> None:
        with (
            _on_device(device, layers),
            runtime.rng.preserved(),
            without_gradients(model),
            counter,
        ):
            for layer in layers:
                with context():
                    out_1SH = _layer_output(model, layer, device)
                out_1SH.float().square().mean().backward()
            if model.part.head and model.head_weight is not None:
                with counter.part(HEAD):
                    with context():
                        loss = _head_loss(model, model.head_weight, device)
                    loss.backward()

    products = counted_products(compute, device.type)
    wider = check_products(
        runtime.precision,
        products,
        runtime.device.type,
        # torch's own attention computes in float32 on a device that has no fused kernel for a case.
        wide_attention=all(module.op is not reference.attention for module in model.attentions),
    )
    return ModelProducts(products, wider)


def _layer_kinds(model: Model) -> list[nn.Module]:
    """Return the first layer of each kind; none if the family has no `run_stage`."""
    if type(model).run_stage is Model.run_stage:
        return []
    kinds: dict[object, nn.Module] = {}
    for layer in model.layers:
        kinds.setdefault(module_kind(layer), layer)
    return list(kinds.values())


@contextlib.contextmanager
def _on_device(device: torch.device, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Move modules to a device for the context; parameters of the meta device get memory there."""
    homes = [next(module.parameters()).device for module in modules]
    for module, home in zip(modules, homes, strict=True):
        if home.type == "meta":
            module.to_empty(device=device)
        else:
            module.to(device)
    try:
        yield
    finally:
        for module, home in zip(modules, homes, strict=True):
            module.to(home)


def _layer_output(model: Model, layer: nn.Module, device: torch.device) -> Tensor:
    dtype = next(layer.parameters()).dtype
    length = min(_TOKENS, model.shape.max_position_embeddings)
    size = (1, length, model.shape.hidden_size)
    x_1SH = torch.ones(size, dtype=dtype, device=device, requires_grad=True)
    tokens_1S = torch.zeros(1, length, dtype=torch.int64, device=device)
    batch = {model.family.tokens: tokens_1S}
    if model.masked:
        batch["documents_BS"] = tokens_1S
    return model.run_stage(x_1SH, batch, [layer], last=False)


def _head_loss(model: Model, weight_VH: Tensor, device: torch.device) -> Tensor:
    """Return the loss of a vocabulary of few rows."""
    dtype, hidden = weight_VH.dtype, weight_VH.shape[1]
    rows = min(_ROWS, weight_VH.shape[0])
    weight_RH = torch.zeros(rows, hidden, dtype=dtype, device=device, requires_grad=True)
    x_SH = torch.zeros(_TOKENS, hidden, dtype=dtype, device=device, requires_grad=True)
    target_S = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    loss_weight_S = torch.ones(_TOKENS, device=device)
    return model.head_loss(x_SH, weight_RH, target_S, loss_weight_S)


def create_model(
    shape: ModelShape,
    ops: OpBinding,
    recompute: Recompute = KEEP_ALL,
    *,
    masked: bool = False,
    part: ModelPart | None = None,
) -> Model:
    """Return an uninitialized model of the family of *shape*; see `Model` for the arguments."""
    model: Model = family_of(shape).load_model()(shape, ops, recompute, masked=masked, part=part)
    return model


def op_binding(runtime: Runtime, *, compile_blocks: bool = False) -> OpBinding:
    """Return the binding of a model's ops on the run's device, in the run's dtype.

    Args:
        runtime: Op table, device and precision.
        compile_blocks: True if each layer will be compiled.
    """
    return OpBinding(
        runtime.ops, runtime.device.type, runtime.precision.activations, compile=compile_blocks
    )


def build_model(
    shape: ModelShape,
    runtime: Runtime,
    *,
    compile_blocks: bool = False,
    masked: bool = False,
    part: ModelPart | None = None,
    device: torch.device | None = None,
) -> Model:
    """Return an uninitialized model of the family of *shape*.

    Args:
        shape: Sizes of the model.
        runtime: Device, kernels, precision and recompute policy.
        compile_blocks: True if each layer is compiled at its first call.
        masked: True if attention can be limited to documents.
        part: Part of the model to build; None: all of it.
        device: Device of the parameters, possibly the meta device, on which they have no memory;
            None: the run's device.

    Raises:
        DeviceError: The precision policy has no effect in the model.
        PluginError: The precision policy broke the model.
    """
    with runtime.ops.bind_all(), device or runtime.device.torch_device:
        model = create_model(
            shape,
            op_binding(runtime, compile_blocks=compile_blocks),
            recompute_of(runtime, compile_blocks=compile_blocks),
            masked=masked,
            part=part,
        )
    model.products = apply_precision(model, runtime)
    if compile_blocks:
        backend = _compile_backend(runtime.device)
        for layer in model.layers:
            layer.compile(dynamic=False, **backend)
    return model


def _compile_backend(device: Device) -> dict[str, Any]:
    """Return the argument of `torch.compile` for the device's backend; empty for torch's default.

    Raises:
        PluginError: torch knows no backend of the name, which it would say only at the first step.
    """
    chosen = device.compile_backend
    if chosen is None:
        return {}
    if isinstance(chosen, str):
        import torch

        known = torch.compiler.list_backends(exclude_tags=())
        if chosen not in known:
            raise PluginError(
                f"device `{device.type}` names `{chosen}` as its `compile_backend`",
                why="`torch.compile` has no backend of this name here",
                hint=suggestion(chosen, known),
            )
    return {"backend": chosen}
