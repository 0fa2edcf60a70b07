"""What a run's memory is used for: weights, gradients, optimizer state, and all else.

The first three are counted tensor by tensor.  Activations are what is left of the memory that the
device counts as used; how large single ones are follows from the shape of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.accelerator.memory_stats import MemoryStats
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["Activation", "Consumer", "MemoryUse", "activations", "in_units", "measure"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ROOMY = 0.7
"""Share of the memory up to which what stays from step to step leaves room for activations."""
_DEPTH = 6
"""Of containers in an optimizer that are looked through for its tensors."""


def in_units(count: float) -> str:
    """Return bytes for people: "1.5 GiB"."""
    for name, size in _UNITS:
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:.0f} bytes"


@dataclass(frozen=True)
class Consumer:
    """What takes memory, and its largest tensor.

    Attributes:
        name: For people.
        size: Bytes on this process's device.
        largest: The largest tensor, for people; empty where there is none.
    """

    name: str
    size: int
    largest: str = ""


@dataclass(frozen=True)
class Activation:
    """A kind of tensor that a forward pass makes.

    Attributes:
        name: For people.
        shape: Its size.
        size: Bytes of one.
        dtype: Name of its dtype.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    dtype: str


@dataclass(frozen=True)
class MemoryUse:
    """What the memory of a process's device is used for.

    Attributes:
        stats: What the device counts; None where it does not.
        others: Bytes that other processes use; None where the device does not tell.
        weights, gradients, optimizer: Counted.
        to_come: Bytes of gradients that are not there yet, and will be in backward.
        rest: What is left: activations and all else; None where the device does not count.
    """

    stats: MemoryStats | None
    others: int | None
    weights: Consumer
    gradients: Consumer
    optimizer: Consumer
    to_come: int
    rest: int | None

    @property
    def kept(self) -> int:
        """Bytes that stay from step to step, gradients to come included."""
        return self.weights.size + self.gradients.size + self.optimizer.size + self.to_come

    @property
    def fits_without_activations(self) -> bool:
        """Whether what stays leaves room for any activation; true where nobody knows."""
        total = self.stats.total if self.stats is not None else None
        return total is None or self.kept < total

    @property
    def activations_lead(self) -> bool:
        """Whether smaller activations are the first thing to try."""
        total = self.stats.total if self.stats is not None else None
        if total is None:
            return self.rest is None or self.rest >= self.kept
        return self.kept < _ROOMY * total


def measure(state: TrainState | None, device: Device, *, buckets: bool = False) -> MemoryUse:
    """Return what the memory of *device* is used for now.

    Args:
        state: Of the run; None where there is none yet.
        device: This process's.
        buckets: Whether there is room for all gradients from the start, to exchange them.
    """
    named = _parameters(state) if state is not None else []
    seen: set[tuple[torch.device, int]] = set()
    weights = _consumer("weights", named, device, seen)
    trained = sum(one.nbytes for _, one in named if one.requires_grad and _on(one, device))
    gradients = _consumer("gradients", _gradients(state, named), device, seen)
    if buckets and gradients.size < trained:
        gradients = Consumer("gradients", trained)
    kept = _optimizer_tensors(state) if state is not None else []
    optimizer = _consumer("optimizer state", kept, device, seen)
    stats = device.memory_stats() if device.memory_stats is not None else None
    counted = weights.size + gradients.size + optimizer.size
    return MemoryUse(
        stats,
        _others(device, stats),
        weights,
        gradients,
        optimizer,
        to_come=max(0, trained - gradients.size),
        rest=max(0, stats.allocated - counted) if stats is not None else None,
    )


def _parameters(state: TrainState) -> list[tuple[str, Tensor]]:
    """Return the process's parts of the weights; of sharded ones, those that are its own."""
    return [(name, _local(one)) for name, one in state.parallel.named_parameters()]


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)  # of torch's distributed tensors
    found: Tensor = to_local() if to_local is not None else tensor
    return found


def _gradients(
    state: TrainState | None, named: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return gradients of the process's parts, and those that a backward pass is at."""
    modules = state.model.named_parameters() if state is not None else []
    return [(name, _local(one.grad)) for name, one in [*named, *modules] if one.grad is not None]


def _optimizer_tensors(state: TrainState) -> list[tuple[str, Tensor]]:
    """Return every tensor that the optimizer holds, its parameters among them."""
    return [("", one) for one in _tensors_in(state.optimizer, _DEPTH)]


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, str | bytes | int | float | torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _tensors_in(one, depth - 1)
    elif type(value).__module__.startswith("lmcore.optim"):
        inner = vars(value) if not dataclasses.is_dataclass(value) else _fields(value)
        yield from _tensors_in(inner, depth - 1)


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def _on(tensor: Tensor, device: Device) -> bool:
    return tensor.device.type == device.type


def _consumer(
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    device: Device,
    seen: set[tuple[torch.device, int]],
) -> Consumer:
    """Return what some tensors take; a storage counts once, for whoever comes first."""
    size, largest = 0, (0, "")
    for label, tensor in tensors:
        storage = tensor.untyped_storage() if _on(tensor, device) else None
        key = (tensor.device, storage.data_ptr()) if storage is not None else None
        if storage is None or key is None or key in seen or not storage.nbytes():
            continue
        seen.add(key)
        size += storage.nbytes()
        if tensor.nbytes > largest[0]:
            shown = f"`{label}` " if label else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            words = f"{shown}{list(tensor.shape)} {dtype}, {in_units(tensor.nbytes)}"
            largest = (tensor.nbytes, words)
    return Consumer(name, size, largest[1])


def _others(device: Device, stats: MemoryStats | None) -> int | None:
    """Return what neither is free nor held by this process; None where that cannot be told."""
    if stats is None or device.type == "cpu":
        return None
    try:
        free, total = torch.get_device_module(device.type).mem_get_info(device.torch_device)
    except (RuntimeError, AttributeError):  # torch's module of the device cannot tell
        return None
    return max(0, int(total) - int(free) - stats.reserved)


def activations(plan: RunPlan, runtime: Runtime) -> list[Activation]:
    """Return the large tensors of one micro-batch's forward pass, the largest first.

    Kernels may keep less: a fused attention makes no scores, a fused loss no scores over the
    vocabulary.  None of them keeps more.
    """
    layout, shape = plan.layout, ModelShape.from_plan(plan)
    own = shape.narrowed(layout.tensor)
    batch = plan.config.training.micro_batch_size
    length = plan.config.model.seq_length // layout.context
    between = length // layout.tensor if layout.sequence else length
    compute = runtime.precision.compute
    narrow = max(2, getattr(torch, compute).itemsize)
    dtype = compute if narrow == getattr(torch, compute).itemsize else runtime.precision.keep
    heads = own.num_attention_heads
    channels = own.ffn_hidden_size * (2 if own.swiglu else 1)
    kinds = [
        ("scores over the vocabulary", (batch * length, own.padded_vocab_size), 4, "float32"),
        ("attention scores", (batch, heads, length, length * layout.context), narrow, dtype),
        ("feed-forward channels", (batch, length, channels), narrow, dtype),
        ("hidden states", (batch, between, shape.hidden_size), narrow, dtype),
    ]
    found = [
        Activation(name, sizes, math.prod(sizes) * width, of) for name, sizes, width, of in kinds
    ]
    return sorted(found, key=lambda one: -one.size)
