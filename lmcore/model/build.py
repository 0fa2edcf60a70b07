"""Build the model that a plan asks for, on the run's device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from lmcore.model.gpt import GPT
from lmcore.model.op_binding import OpBinding
from lmcore.model.recompute import recompute_of
from lmcore.model.shape import ModelPart, ModelShape

if TYPE_CHECKING:
    import torch

    from lmcore.runtime.runtime import Runtime

__all__ = ["build_model", "op_binding"]


def op_binding(runtime: Runtime, *, compile_blocks: bool = False) -> OpBinding:
    """Return the binding of a model's ops on the run's device, in the run's dtype."""
    return OpBinding(
        runtime.ops, runtime.device.type, runtime.precision.activations, compile=compile_blocks
    )


def build_model(
    shape: ModelShape,
    runtime: Runtime,
    *,
    seed: int | None,
    compile_blocks: bool = False,
    masked: bool = False,
    part: ModelPart | None = None,
    device: torch.device | None = None,
) -> GPT:
    """Return a GPT on the run's device, or where *device* says.

    Args:
        shape: Its numbers.
        runtime: Device, kernels, precision and recompute policy.
        seed: Seed of the initial weights; None leaves them uninitialised, to be loaded.
        compile_blocks: Whether each block is compiled at its first call.
        masked: Whether tokens of a sample may be told to attend to their own document alone.
        part: What of the model to build; None: all.
        device: Where its parameters are made, which may be the meta device: they then have no
            values and no memory.  None: on the run's device.

    Raises:
        DeviceError: The precision is not in force in the model.
        PluginError: The precision's preparation spoilt it.
    """
    with runtime.ops.bind_all(), device or runtime.device.torch_device:
        model = GPT(
            shape,
            op_binding(runtime, compile_blocks=compile_blocks),
            recompute_of(runtime, compile_blocks=compile_blocks),
            masked=masked,
            part=part,
        )
    if seed is not None:
        model.initialize(seed)
    with _smallest_projection_on(runtime.device.torch_device, model):
        runtime.precision.apply(model)
    if compile_blocks:
        for block in model.blocks.values():
            block.compile(dynamic=False)
    return model


@contextlib.contextmanager
def _smallest_projection_on(device: torch.device, model: GPT) -> Iterator[None]:
    """Give memory to the projection that a precision tries, where the model has none yet."""
    projections = [one for one in model.modules() if isinstance(one, nn.Linear)]
    least = min(projections, key=lambda one: one.weight.numel())
    if not least.weight.is_meta:
        yield
        return
    least.to_empty(device=device)
    yield
    least.to("meta")
