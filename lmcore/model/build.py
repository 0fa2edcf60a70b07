"""Build the model of a run on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.model.op_binding import OpBinding
from lmcore.model.products import apply_precision
from lmcore.model.recompute import recompute_of
from lmcore.model.registry import create_model

if TYPE_CHECKING:
    import torch

    from lmcore.model.protocol import Model
    from lmcore.model.shape import ModelPart, ModelShape
    from lmcore.runtime.runtime import Runtime

__all__ = ["build_model", "op_binding"]


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
        for layer in model.layers:
            layer.compile(dynamic=False)
    return model
