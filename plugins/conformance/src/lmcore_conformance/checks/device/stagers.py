"""Level 1: checkpoint stagers: every bit of every dtype and size arrives, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from lmcore.base.errors import LmcoreError
from lmcore.contract import CheckpointStager, host_copy_stager
from lmcore.contract.transfer.staging import begin_staging, stage_tensors
from lmcore_conformance.checks.device.streams import queued_products
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="device")

_MIB = 2**20
_LARGE = 2**24
"""Bytes above which a copy may be made in pieces."""

_STORED = (
    *("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"),
    *("int16", "int8", "float64", "float8_e4m3fn", "float8_e5m2"),
)
_ON_HOST = ("float64", "float32", "int64", "uint8")
"""Dtypes of the state that a run keeps on the host, whatever the device has."""

_SURE = 7
"""Number of the first dtypes that every device holds."""

_SHOWN = 4
_TIMES = 10
_BUFFERS = 3
"""Copies that a stager may keep, to use their memory again."""


@_check(
    "device.stagers",
    "Each checkpoint stager, also the core's host copy, copies tensors to the host bit for bit, of "
    "every dtype and size, and waits for the device; later changes do not affect the copies, if a "
    "copy has begun from `end_reads` on; earlier copies are not kept.",
    reason="A checkpoint contains what the stager returned.",
    seconds=90,
)
def stagers(bench: Bench) -> str:
    """Stage tensors twice, changing them in between; the core's host copy always counts."""
    faults, names = [], []
    for at, first in enumerate(_offers(bench)):
        if first.available() is not None:
            continue
        names.append(first.name)
        for part in _PARTS:
            # A new one each time: a stager may expect the same tensors in each copy.
            stager = _offers(bench)[at]
            try:
                found = list(dict.fromkeys(part(bench, stager)))
            except LmcoreError as error:
                found = [error.why or error.what]
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            faults += [f"`{stager.name}`: {fault}" for fault in found[:_SHOWN] + more]
    return conclude(faults, ", ".join(names))


def _offers(bench: Bench) -> tuple[CheckpointStager, ...]:
    return (*bench.new_stagers(), host_copy_stager())


def _tensors(bench: Bench) -> dict[str, Tensor]:
    """Return tensors of all dtypes and layouts, whose numbers need all bits of their dtypes."""
    on = bench.torch_device
    own = [name for at, name in enumerate(_STORED) if at < _SURE or _holds(bench, name)]
    return {
        "weight": bench.values(40, 30).float().to(on),
        "weight of the same shape": bench.values(40, 30, seed=1).float().to(on),
        "strided": bench.values(6, 9).bfloat16().to(on).t(),
        "large": bench.values(400, 300).float().to(on),
        "large on the host": bench.values(400, 300).float(),
        "step": torch.tensor(3.0),
        "step on the device": torch.tensor(3.0, device=on),
        "state": torch.arange(7, dtype=torch.uint8),
        "empty": torch.empty(0, 4, device=on),
        **{name: _numbers(bench, name).to(on) for name in own},
        **{f"{name} on the host": _numbers(bench, name) for name in _ON_HOST},
    }


def _holds(bench: Bench, name: str) -> bool:
    """Return True if the device computes in a dtype, or holds integers of it."""
    dtype = getattr(torch, name)
    if name in bench.device.dtypes or dtype.is_floating_point:
        return name in bench.device.dtypes
    try:
        torch.ones(3, dtype=dtype, device=bench.torch_device).add_(1).cpu()
    except (RuntimeError, TypeError):
        return False
    return True


def _numbers(bench: Bench, name: str) -> Tensor:
    """Return numbers on the host that a narrower dtype cannot hold."""
    dtype = getattr(torch, name)
    values = bench.values(13, 11, seed=5)
    if dtype.is_floating_point:
        return values.to(dtype)
    if dtype == torch.bool:
        return values > 0
    # Odd numbers above 2**53 are lost in float64, and wrap to all bits of smaller integers.
    wide = (values * 2.0**58).to(torch.int64) | 1
    return wide if dtype == torch.int64 else (wide >> 3).to(dtype)


def _large_tensors(bench: Bench) -> dict[str, Tensor]:
    """Return tensors of a little more than 2**24 bytes."""
    generator = torch.Generator().manual_seed(3)
    size = (_LARGE + 5,)
    noise = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    return {
        f"{_LARGE + 5:,} bytes": noise.to(bench.torch_device),
        f"{_LARGE + 4:,} bytes of float32": torch.arange(
            1, _LARGE // 4 + 2, dtype=torch.float32, device=bench.torch_device
        ),
    }


def _small_copied(bench: Bench, stager: CheckpointStager) -> Iterator[str]:
    yield from _copied(bench, stager, _tensors(bench))


def _large_copied(bench: Bench, stager: CheckpointStager) -> Iterator[str]:
    yield from _copied(bench, stager, _large_tensors(bench))


def _copied(bench: Bench, stager: CheckpointStager, live: dict[str, Tensor]) -> Iterator[str]:
    """Stage twice, and begin a copy twice; yield what has other numbers."""
    for _ in range(2):
        before = {name: tensor.cpu().clone() for name, tensor in live.items()}
        staged = stage_tensors(stager, live)
        if stager.copies:
            _change(live)
        bench.device.synchronize()
        yield from _other_numbers(staged, before)
        if not stager.copies:
            _change(live)
    if stager.begin is None:
        return
    for _ in range(2):
        before = {name: tensor.cpu().clone() for name, tensor in live.items()}
        pending = begin_staging(stager, live, live.keys())
        pending.end_reads()
        _change(live)
        pending.finish()
        yield from _other_numbers(pending.tensors, before)


def _change(live: Mapping[str, Tensor]) -> None:
    """Change every number in place."""
    for tensor in live.values():
        if tensor.dtype.itemsize == 1:  # torch adds to no logical value, and to no 8-bit float
            other = tensor.cpu().contiguous().view(torch.uint8) ^ 1
            tensor.copy_(other.view(tensor.dtype))
        else:
            tensor.add_(1)


def _other_numbers(staged: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in staged.items():
        wrong = _bytes(tensor) != _bytes(before[name])
        if wrong.any():
            first = int(wrong.nonzero()[0]) // tensor.dtype.itemsize
            yield (
                f"`{name}` has other numbers: of {tensor.numel():,} in {tensor.dtype}, the first "
                f"is number {first:,}"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _unfinished(bench: Bench, stager: CheckpointStager) -> Iterator[str]:
    """Stage the result of queued work and read the copy at once; yield if it is not there."""
    if bench.is_host or not stager.copies:
        return
    products = queued_products(bench)
    for factor in (1.0, 2.0, 3.0):  # a buffer that is used again has the numbers of before
        right_NN = products.right_NN * factor
        staged = stage_tensors(stager, {"weight": products.run() * factor})
        if not torch.equal(staged["weight"], right_NN):
            yield "it returns before its copy is there: it does not wait for the device"
            return
        if stager.begin is None:
            continue
        live = {"weight": products.run() * -factor}
        pending = begin_staging(stager, live, live.keys())
        pending.finish()
        if not torch.equal(pending.tensors["weight"], -right_NN):
            yield "`finish` returns before the copy is there: it does not wait for the device"
            return


def _kept(bench: Bench, stager: CheckpointStager) -> Iterator[str]:
    """Stage several times; yield if the earlier copies are still there."""
    if not stager.copies:
        return
    live = {"weight": torch.zeros(_LARGE, dtype=torch.uint8, device=bench.torch_device)}

    def stage() -> list[weakref.ref[Tensor]]:
        made = [weakref.ref(stage_tensors(stager, live)["weight"])]
        if stager.begin is not None:
            pending = begin_staging(stager, live, live.keys())
            pending.end_reads()
            pending.finish()
            made.append(weakref.ref(pending.tensors["weight"]))
        return made

    for _ in range(_BUFFERS):
        stage()
    bench.device.synchronize()  # what is queued may hold memory
    start = psutil.Process().memory_info().rss
    made = [one for _ in range(_TIMES) for one in stage()]
    gc.collect()
    bench.device.synchronize()
    left = {id(one()) for one in made} - {id(None)}
    grown = psutil.Process().memory_info().rss - start
    if len(left) > _BUFFERS:
        yield f"{len(left)} of its last {len(made)} copies are still in memory"
    elif bench.is_host and grown > _BUFFERS * _LARGE:  # a queue of copies holds memory, too
        yield (
            f"{len(made)} copies of {_LARGE // _MIB} MiB leave {grown / _MIB:.0f} MiB more in use: "
            "it keeps the earlier ones"
        )


def _finished_again(bench: Bench, stager: CheckpointStager) -> Iterator[str]:
    """Call `finish` again, before and after `end_reads`; yield what raises or has changed."""
    if stager.begin is None:
        return
    live = {"weight": bench.values(40, 30).float().to(bench.torch_device)}
    before = {name: tensor.cpu().clone() for name, tensor in live.items()}
    for order in (
        ("end_reads", "finish", "finish"),
        ("finish", "end_reads", "finish"),
        ("finish", "finish", "end_reads"),
    ):
        pending = begin_staging(stager, live, live.keys())
        for at, name in enumerate(order):
            try:
                getattr(pending, name)()
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                earlier = ", ".join(f"`{one}`" for one in order[:at])
                raised = f"raised {type(error).__name__}: {error}"
                yield f"`{name}` after {earlier or 'nothing'} {raised}"
                return
        yield from _other_numbers(pending.tensors, before)


_PARTS = (_small_copied, _large_copied, _unfinished, _finished_again, _kept)
