"""Collectives of a session: reductions, gathers and broadcasts of tensors, numbers and JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError, RunError
from lmcore.contract.dtype import dtype_name
from lmcore.parallel.collectives import gather_into

if TYPE_CHECKING:
    from lmcore.runtime.process.group import Processes
    from lmcore.runtime.runtime import Runtime
    from lmcore.runtime.store import StoreClient

__all__ = ["all_gather", "all_reduce", "broadcast", "check_same", "gather_samples"]

_agreed: WeakKeyDictionary[StoreClient, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""Collectives that all ranks have made, by the connection of a session."""
_OPERATIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN"}


def all_reduce(runtime: Runtime, value: Any, op: str = "mean", name: str = "") -> Any:
    """Return a value reduced over all ranks; see `Session.all_reduce`.

    Args:
        runtime: Device and processes.
        value: Tensor, number, or list, tuple or dict of these.  A tensor of another device is
            returned on that device.
        op: "mean", "sum", "max" or "min".
        name: Name of the value within a larger one, for messages: "['loss']".
    """
    if op not in _OPERATIONS:
        raise ConfigError(
            f"`all_reduce(op={op!r})`: unknown operation", hint='use "mean", "sum", "max" or "min"'
        )
    if isinstance(value, dict):
        return {
            key: all_reduce(runtime, each, op, f"{name}[{key!r}]") for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        parts = [
            all_reduce(runtime, each, op, f"{name}[{index}]") for index, each in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Tensor):
        return _all_reduce(runtime, value, op, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            f"`all_reduce` of {type(value).__name__}",
            why="tensors and numbers are reduced, and lists, tuples and dicts of them",
            hint="`all_gather` takes other values",
        )
    # By the store, in the host's double precision, which not every device has.
    about = f"`all_reduce` by {op} of a number{name and f' {name}'}"
    values = _gather(runtime, value, about)
    if op in {"max", "min"}:
        return max(values) if op == "max" else min(values)
    total = sum(values)
    return total / len(values) if op == "mean" else total


def _all_reduce(runtime: Runtime, tensor: Tensor, op: str, name: str) -> Tensor:
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"`all_reduce` of a tensor of {tensor.dtype} by its mean",
            why="a mean of integers is no integer",
            hint='convert it with `.float()`, or pass `op="sum"`',
        )
    if runtime.processes is None:
        return tensor.detach().clone()
    from torch import distributed

    _agree(runtime.processes, f"`all_reduce` by {op}", tensor, name)
    moved = _on_device(runtime, tensor).clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(moved, op=getattr(distributed.ReduceOp, _OPERATIONS[op]))
    if op == "mean":
        moved /= runtime.rank.world_size
    return moved.to(tensor.device)


def all_gather(runtime: Runtime, value: Any) -> Any:
    """Return the values of all ranks in the order of ranks; see `Session.all_gather`."""
    if not isinstance(value, Tensor):
        _check_json(value, "all_gather")
        return _gather(runtime, value, "`all_gather`")
    if runtime.processes is None:
        return value.detach().clone().unsqueeze(0)
    _agree(runtime.processes, "`all_gather`", value)
    own = _on_device(runtime, value).contiguous()
    rows = own.new_empty((runtime.rank.world_size * max(1, own.numel()),))
    gather_into(rows, own.reshape(-1) if own.numel() else own.new_zeros(1))
    rows = rows.view(runtime.rank.world_size, -1)[:, : own.numel()]
    return rows.reshape(runtime.rank.world_size, *own.shape).to(value.device)


def gather_samples(runtime: Runtime, value: Any, count_new: Callable[[int], int]) -> Any:
    """Return the samples of all ranks without repeated ones; see `Session.gather_for_metrics`.

    Args:
        runtime: Device and processes.
        value: Results for a batch.
        count_new: Function of the number of samples of this rank, which returns how many count.
    """
    if isinstance(value, dict):
        return {key: gather_samples(runtime, each, count_new) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and any(map(_has_tensors, value)):
        parts = [gather_samples(runtime, each, count_new) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Tensor):
        rows = value.detach().clone().reshape(value.shape or (1,))
        return _gather_rows(runtime, rows[: count_new(len(rows))])
    samples = list(value) if isinstance(value, (list, tuple)) else [value]
    samples = samples[: count_new(len(samples))]
    _check_json(samples, "gather_for_metrics")
    ranks = _gather(runtime, samples, "`gather_for_metrics` of values")
    return [sample for own in ranks for sample in own]


def _has_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return any(map(_has_tensors, values))
    return isinstance(value, Tensor)


def _gather_rows(runtime: Runtime, rows: Tensor) -> Tensor:
    """Return the rows of all ranks, which may have different numbers of them."""
    processes = runtime.processes
    if processes is None:
        return rows
    about = "`gather_for_metrics` of a tensor"
    own = {"shape of a sample": list(rows.shape[1:]), "dtype": dtype_name(rows.dtype)}
    found = processes.gather([len(rows), own], about)
    if any(facts != own for _, facts in found):
        from lmcore.runtime.process.consistency import check_equal

        check_equal(processes.rendezvous, "the tensors of `gather_for_metrics`", own)
    counts = [count for count, _ in found]
    padded = rows.new_zeros((max(1, *counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    whole = all_gather(runtime, padded)
    return torch.cat([part[:count] for part, count in zip(whole, counts, strict=True)])


def broadcast(runtime: Runtime, value: Any, source: int = 0) -> Any:
    """Return the value of one rank on all ranks; see `Session.broadcast`."""
    size = runtime.rank.world_size
    if not 0 <= source < size:
        raise ConfigError(
            f"`broadcast(source={source})`: no such rank", why=f"there are {size}, from 0 on"
        )
    if not isinstance(value, Tensor):
        own = value if runtime.rank.rank == source else None
        _check_json(own, "broadcast")
        return _gather(runtime, own, "`broadcast`")[source]
    if runtime.processes is None:
        return value.detach().clone()
    from torch import distributed

    _agree(runtime.processes, f"`broadcast` from rank {source}", value)
    moved = _on_device(runtime, value).clone(memory_format=torch.contiguous_format)
    distributed.broadcast(moved, src=source)
    return moved.to(value.device)


def _agree(processes: Processes, call: str, tensor: Tensor, name: str = "") -> None:
    """Check that all ranks make the same collective, the first time that this rank makes it.

    A backend may abort the process, or return wrong numbers, if they differ in op or size.

    Raises:
        RunError: They differ, or the script has destroyed torch's default group.
    """
    from torch import distributed

    if not distributed.is_initialized():
        raise RunError(
            f"{call}: torch's process group is gone",
            why="the script has called `torch.distributed.destroy_process_group`",
            hint="delete that call: the end of the session destroys the group",
        )
    seen = _agreed.setdefault(processes.rendezvous.store, set())
    key = (call, name, tensor.shape, tensor.dtype)
    if key not in seen:
        kind = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        processes.barrier(f"{call} of a tensor{name and f' {name}'}, {kind}")
        seen.add(key)
    processes.rendezvous.watch.begin_call(call)


def _on_device(runtime: Runtime, tensor: Tensor) -> Tensor:
    return tensor.detach().to(runtime.device.torch_device)


def _gather(runtime: Runtime, value: Any, about: str) -> list[Any]:
    """Return the JSON values of all ranks; with one process, too, lists in place of tuples."""
    if runtime.processes is None:
        return [json.loads(json.dumps(value))]
    return runtime.processes.gather(value, about)


def _check_json(value: Any, function: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as cause:
        raise ConfigError(
            f"`{function}` of {type(value).__name__}",
            why=f"it is neither a tensor nor a JSON value: {cause}",
            hint="objects are not pickled between processes: pass tensors, numbers, text, lists "
            "and dicts",
        ) from cause


def check_same(runtime: Runtime, subject: str, value: Any) -> None:
    """Check that all ranks have an equal JSON value; all ranks must call it.

    Args:
        runtime: Processes.
        subject: Name of the value for messages.
        value: JSON value; only its digest is sent if all are equal.

    Raises:
        RunError: They differ; with the ranks that have each value.
    """
    if runtime.processes is None:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    if len(set(runtime.processes.gather(digest, subject))) > 1:
        from lmcore.runtime.process.consistency import check_equal

        hint = "build the same on every rank; only their samples may differ"
        check_equal(runtime.processes.rendezvous, subject, value, hint=hint)
