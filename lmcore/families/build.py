"""Build a model, of any family, and the model of a run on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcore.base.errors import PluginError, suggestion
from lmcore.families.op_binding import OpBinding
from lmcore.families.products import apply_precision
from lmcore.families.recompute import KEEP_ALL, Recompute, recompute_of
from lmcore.model.family import family_of

if TYPE_CHECKING:
    import torch

    from lmcore.contract import Device
    from lmcore.families.protocol import Model
    from lmcore.model.shape import ModelPart, ModelShape
    from lmcore.runtime.runtime import Runtime

__all__ = ["build_model", "create_model", "op_binding"]


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
