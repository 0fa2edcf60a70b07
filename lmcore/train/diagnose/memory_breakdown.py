"""Breakdown of a run's memory: weights, gradients, optimizer state, and the rest.

Weights, gradients and optimizer state are counted tensor by tensor.  Activations are the rest of
the allocated memory; the sizes of single activations follow from the shape of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.contract.dtype import dtype_name
from lmcore.contract.torch_device import memory_info
from lmcore.families.heads.family import CHOICE
from lmcore.model.family import family_of, stacks_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.device import Device
    from lmcore.contract.memory_stats import MemoryStats
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = [
    "ROOMY",
    "Activation",
    "Consumer",
    "MemoryUse",
    "activations",
    "in_units",
    "measure",
]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
ROOMY = 0.7
"""Largest share of the memory for persistent tensors that leaves room for activations."""
_DEPTH = 6
"""Depth of nested containers in an optimizer that are searched for tensors."""


def in_units(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"."""
    for name, size in _UNITS:
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:.0f} bytes"


@dataclass(frozen=True)
class Consumer:
    """A group of tensors that takes memory.

    Attributes:
        name: Name of the group for messages.
        size: Size in bytes on this rank's device.
        largest: Description of the largest tensor; empty if there is none.
    """

    name: str
    size: int
    largest: str = ""


@dataclass(frozen=True)
class Activation:
    """A kind of tensor in the forward pass.

    Attributes:
        name: Name for messages.
        shape: Shape for one micro-batch.
        size: Size of one tensor in bytes.
        dtype: Name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    dtype: str


@dataclass(frozen=True)
class MemoryUse:
    """The use of the memory of this rank's device.

    Attributes:
        stats: Memory statistics of the device; None if it has none.
        others: Bytes used by other processes; None if unknown.
        weights, gradients, optimizer: Groups of tensors that are counted.
        to_come: Bytes of gradients that the backward pass is still to allocate.
        rest: Bytes of activations and everything else; None if the device has no statistics.
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
        """Bytes that persist from step to step, including gradients still to be allocated."""
        return self.weights.size + self.gradients.size + self.optimizer.size + self.to_come

    @property
    def fits_without_activations(self) -> bool:
        """True if persistent tensors leave room for activations, or if the total is unknown."""
        total = self.stats.total if self.stats is not None else None
        return total is None or self.kept < total

    @property
    def activations_lead(self) -> bool:
        """True if smaller activations are the first remedy."""
        total = self.stats.total if self.stats is not None else None
        if total is None:
            return self.rest is None or self.rest >= self.kept
        return self.kept < ROOMY * total


def measure(state: TrainState | None, device: Device, *, buckets: bool = False) -> MemoryUse:
    """Return the current use of the memory of *device*.

    Args:
        state: State of the run; None before it is built.
        device: Device of this rank.
        buckets: True if buckets for all gradients are allocated from the start.
    """
    named = _parameters(state) if state is not None else []
    seen: set[tuple[torch.device, int]] = set()
    weights = _consumer("weights", named, device, seen)
    trained = sum(
        tensor.nbytes for _, tensor in named if tensor.requires_grad and _on(tensor, device)
    )
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
    """Return the weights of this rank; of sharded weights its own shards."""
    return [(name, _local(parameter)) for name, parameter in state.parallel.named_parameters()]


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)  # a method of torch's distributed tensors
    found: Tensor = to_local() if to_local is not None else tensor
    return found


def _gradients(
    state: TrainState | None, named: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the gradients of this rank's weights, finished or accumulating in a backward pass."""
    modules = state.model.named_parameters() if state is not None else []
    return [
        (name, _local(parameter.grad))
        for name, parameter in [*named, *modules]
        if parameter.grad is not None
    ]


def _optimizer_tensors(state: TrainState) -> list[tuple[str, Tensor]]:
    """Return every tensor of the optimizer, including its parameters."""
    return [("", tensor) for tensor in _tensors_in(state.optimizer, _DEPTH)]


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, str | bytes | int | float | torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif type(value).__module__.startswith("lmcore.optim"):
        inner = vars(value) if not dataclasses.is_dataclass(value) else _fields(value)
        yield from _tensors_in(inner, depth - 1)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _on(tensor: Tensor, device: Device) -> bool:
    return tensor.device.type == device.type


def _consumer(
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    device: Device,
    seen: set[tuple[torch.device, int]],
) -> Consumer:
    """Return the memory of some tensors; a shared storage counts once, for the first tensor."""
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
            dtype = dtype_name(tensor.dtype)
            words = f"{shown}{list(tensor.shape)} {dtype}, {in_units(tensor.nbytes)}"
            largest = (tensor.nbytes, words)
    return Consumer(name, size, largest[1])


def _others(device: Device, stats: MemoryStats | None) -> int | None:
    """Return the bytes that other processes use; None if unknown."""
    if stats is None or device.type == "cpu":
        return None
    info = memory_info(device.type, device.index)
    if info is None:
        return None
    free, total = info
    return max(0, total - free - stats.reserved)


def activations(plan: RunPlan, runtime: Runtime) -> list[Activation]:
    """Return the large tensors of one micro-batch's forward pass, the largest first.

    A model with several stacks has them of each stack, and attention scores of a stack that reads
    another one.  Fused kernels keep less: a fused attention has no attention scores, a fused loss
    no logits.  Logits are listed if the family predicts every token of a stack; other families'
    samples tell how many.
    """
    layout, shape = plan.layout, plan.shape
    own, family, stacks = shape.narrowed(layout.tensor), family_of(shape), stacks_of(shape)
    batch = plan.config.training.micro_batch_size
    if shape.task == CHOICE:
        batch *= shape.num_labels  # a sequence for each choice
    lengths = {"S": plan.config.model.seq_length // layout.context}
    if family.lengths is not None:
        lengths |= family.lengths(plan.config)
    compute = runtime.precision.compute
    narrow = max(2, getattr(torch, compute).itemsize)
    dtype = compute if narrow == getattr(torch, compute).itemsize else runtime.precision.keep
    heads, channels = own.num_attention_heads, own.ffn_hidden_size
    kinds: list[tuple[str, tuple[int, ...], int, str]] = []
    for stack in stacks:
        dims = family.batch[stack.tokens][1:]
        length, rows = lengths[dims[-1]], batch * math.prod(lengths[one] for one in dims[:-1])
        between = length // layout.tensor if layout.sequence else length
        of_one = {
            "attention scores": (rows, heads, length, length * layout.context),
            "feed-forward channels": (rows, length, channels * (2 if stack.gated else 1)),
            "hidden states": (rows, between, shape.hidden_size),
        }
        if shape.alibi:
            of_one["attention bias"] = (1, heads, length, length * layout.context)
        if stack.reads:
            dims = family.batch[stack.reads]
            read = math.prod(lengths[one] for one in dims[2:] or dims[1:])
            of_one["cross-attention scores"] = (rows, heads, length, read)
        for kind, sizes in of_one.items():
            kinds.append((f"{stack.name} {kind}".lstrip(), sizes, narrow, dtype))
    targets = family.batch[family.losses[0].weight]
    if targets[1:] in lengths:
        tokens = batch * lengths[targets[1:]]
        kinds.append(("logits", (tokens, own.padded_vocab_size), 4, "float32"))
    found = [
        Activation(name, sizes, math.prod(sizes) * width, of) for name, sizes, width, of in kinds
    ]
    return sorted(found, key=lambda kind: -kind.size)
