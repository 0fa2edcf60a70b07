"""Collectives that a rank has begun, by process group, and the one in which a run hangs.

torch counts the operations of each group, and its flight recorder keeps the last collectives of
all groups: both are read, nothing is recorded here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmcore.runtime.launch.rank import named_ranks

__all__ = [
    "PIPELINE",
    "GroupTrace",
    "count_operations",
    "hanging_collectives",
    "hanging_sends",
    "trace_collectives",
]

PIPELINE = "pipeline"
"""Name of the groups whose ranks send and receive."""

_KEPT = 64
"""Collectives of a group whose names are sent to the rank that collects them."""

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
}
"""Names of dtypes, by torch's names in C++."""


@dataclass(frozen=True)
class GroupTrace:
    """Last collectives of a rank in one process group.

    Attributes:
        name: Name of the group, such as "tensor".
        last: Number of the last collective that was begun, counted from 1.
        waiting: Number of the first collective that has not ended; 0 if all have ended.
        ops: Name and data of the last collectives by number, such as "all_reduce of float32 [8]".
        time: Time at which the last collective was begun, in nanoseconds.
        sends: True if the group is also used to send and receive, which is counted separately.
    """

    name: str
    last: int
    waiting: int
    ops: Mapping[str, str]
    time: int
    sends: bool


def count_operations() -> dict[str, int]:
    """Return the number of operations that this rank has begun, by number and name of the group.

    Sends and receives are counted, too, if the backend counts them.
    """
    found = {}
    # What torch's own reports of hanging ranks show; there is no public name for it.
    with contextlib.suppress(AttributeError, RuntimeError):  # a group is made or destroyed just now
        for group in _groups():
            with contextlib.suppress(RuntimeError, TypeError):  # a backend that does not count
                count = int(group._get_sequence_number_for_group())  # noqa: SLF001
                found[f"{group.group_name} {group.group_desc}"] = count
    return found


def _groups() -> Iterator[Any]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        yield from list(distributed.distributed_c10d._world.pg_names)  # noqa: SLF001


def trace_collectives() -> dict[str, dict[str, Any]]:
    """Return a `GroupTrace` of each group, as JSON, by number and name of the group.

    Empty if torch has no flight recorder, or it is turned off (`TORCH_FR_BUFFER_SIZE=0`).
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(native, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    by_group: dict[str, list[Any]] = {}
    with contextlib.suppress(RuntimeError, ValueError):
        for entry in json.loads(dump(True, False)).get("entries", ()):  # noqa: FBT003
            if not entry["is_p2p"]:
                by_group.setdefault(" ".join(entry["process_group"]), []).append(entry)
    return {key: asdict(_trace(entries)) for key, entries in by_group.items()}


def _trace(entries: Sequence[Mapping[str, Any]]) -> GroupTrace:
    numbers = [int(entry["collective_seq_id"]) for entry in entries]
    active = (
        number
        for number, entry in zip(numbers, entries, strict=True)
        if not entry["retired"] and entry["state"] != "completed"
    )
    kept = list(zip(numbers, entries, strict=True))[-_KEPT:]
    name = entries[-1]["process_group"][1]
    return GroupTrace(
        name={"default_pg": "world", "undefined": ""}.get(name, name),
        last=numbers[-1],
        waiting=next(active, 0),
        ops={str(number): _described(entry) for number, entry in kept},
        time=int(entries[-1]["time_created_ns"]),
        sends=any(entry["op_id"] != entry["collective_seq_id"] for entry in entries),
    )


def _described(entry: Mapping[str, Any]) -> str:
    """Return name and data of a collective, such as "all_reduce of float32 [1000]"."""
    op = str(entry["profiling_name"]).rpartition(":")[2]
    dtypes, sizes = entry.get("input_dtypes") or (), entry.get("input_sizes") or ()
    if not sizes:
        return op
    dtype = str(dtypes[0]).lower() if dtypes else "tensor"
    dtype = _DTYPES.get(dtype, dtype)
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return f"{op} of {dtype} {list(sizes[0])}{more}"


def hanging_collectives(
    traces: Sequence[Mapping[str, GroupTrace] | None],
    counts: Sequence[Mapping[str, int]],
    rank: int | None,
) -> list[str]:
    """Return a line for each collective that some ranks wait in and others have not begun.

    Args:
        traces: Traces of each rank by group; None for a rank that does not answer.
        counts: Operations at the last sign of life of each rank, by group.
        rank: Rank of this process, whose last collective has ended with an error; None if a send or
            receive has.
    """
    failed = None
    if rank is not None:
        own = traces[rank] or {}
        failed = max(own, key=lambda key: own[key].time, default=None)
    lines: list[str] = []
    for key in dict.fromkeys(key for trace in traces for key in trace or ()):
        known = {index: trace[key] for index, trace in enumerate(traces) if trace and key in trace}
        ahead = max(known.values(), key=lambda trace: trace.last)
        behind = {index: trace.last for index, trace in known.items() if trace.last < ahead.last}
        silent = {}  # a rank may have shown no group yet
        for index, trace in enumerate(traces):
            if trace is None and not ahead.sends and (key in counts[index] or not counts[index]):
                silent[index] = counts[index].get(key, 0)
        waits = {
            index: trace.waiting or (trace.last if (index, key) == (rank, failed) else 0)
            for index, trace in known.items()
        }
        number = min(behind.values()) + 1 if behind else next(filter(None, waits.values()), 0)
        inside = [index for index in known if index not in behind and waits[index]]
        if not inside or not (behind or silent):
            continue
        op = next(filter(None, (trace.ops.get(str(number)) for trace in known.values())), "")
        name, _, data = op.partition(" of ")
        call = f"`{name or 'collective'}` #{number} of group {ahead.name or key}"
        lines.append(f"{named_ranks(inside)}: in {call}{f' ({data})' if data else ''}")
        for index, last in behind.items():
            before = known[index].ops.get(str(last), "collective").partition(" of ")[0]
            lines.append(f"rank {index}: has not begun it; its last one is `{before}` #{last}")
        if any(key in own for own in counts):  # torch counts for the backends that it knows
            lines += [f"rank {index}: last seen at #{count}" for index, count in silent.items()]
    return lines


def hanging_sends(counts: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a line for each rank with the number of its last send or receive in the pipeline.

    Args:
        counts: Operations at the last sign of life of each rank, by group.
    """
    return [
        f"rank {rank}: last seen at send or receive #{count} of group {PIPELINE}"
        for rank, own in enumerate(counts)
        for key, count in own.items()
        if key.partition(" ")[2] == PIPELINE
    ]
