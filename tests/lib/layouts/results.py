"""Results of runs in different layouts, collected from all ranks and compared."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import warm
from torch import Tensor

from layouts.cases import Case
from layouts.stored import load

LAUNCH = Path(__file__).with_name("launch.py")


@dataclass(frozen=True)
class Distance:
    """Difference between two runs that should be equal.

    Attributes:
        loss: Largest relative difference of a step's loss.
        norm: Largest relative difference of a step's gradient norm.
        gradient: Largest difference in a gradient of the first step, relative to the largest number
            in that tensor.
        weight: Largest difference of a weight after the last step.
    """

    loss: float
    norm: float
    gradient: float
    weight: float

    def within(self, limit: Distance) -> bool:
        """Return True if no difference exceeds *limit*; NaN does."""
        pairs = ((getattr(self, name), getattr(limit, name)) for name in vars(self))
        return all(value <= most for value, most in pairs)


LIMITS = {
    # Measured: 1.0e-7, 2.4e-7, 1.04e-6 (biases of keys, whose gradients are zero in exact
    # arithmetic, lie in one tensor with those of queries and values), 2.4e-7.
    "fp32": Distance(loss=2.5e-7, norm=6e-7, gradient=2.5e-6, weight=6e-7),
    # 9.6e-8, 2.7e-7, 8.1e-7, 2.1e-7.
    "documents": Distance(loss=2.5e-7, norm=6e-7, gradient=2.5e-6, weight=6e-7),
    # 9.9e-8, 1.9e-7, 1.04e-6, 2.4e-7.
    "uneven": Distance(loss=2.5e-7, norm=6e-7, gradient=2.5e-6, weight=6e-7),
    # 9.4e-8, 5.6e-7, 6.6e-7, 1.8e-7.
    "twice": Distance(loss=2.5e-7, norm=1.2e-6, gradient=2.5e-6, weight=6e-7),
    # 9.7e-8, 1.7e-7, 7.4e-7, 1.2e-7.
    "lamb": Distance(loss=2.5e-7, norm=6e-7, gradient=2.5e-6, weight=6e-7),
    # 9.7e-8, 8.1e-7, 2.0e-6, 1.1e-6.
    "llama": Distance(loss=2.5e-7, norm=2e-6, gradient=5e-6, weight=3e-6),
    # 1.8e-16, 7.2e-16, 2.5e-15, 3.0e-15.
    "llama-documents": Distance(loss=2.5e-7, norm=1e-7, gradient=6e-15, weight=8e-15),
    "bloom": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "bloom-documents": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    # Measured: 4.4e-16, 6.8e-15, 6.5e-15, 3.1e-15 (an AMD EPYC; 2.5e-15 in gradients elsewhere).
    "bert": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "bert-original": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "t5": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    # Attention that is not scaled has larger scores, whose rounding the softmax amplifies.
    # Measured: 1.9e-14, 8.4e-12, 3.4e-14, 9.8e-13.
    "t5-original": Distance(loss=2.5e-7, norm=1e-7, gradient=1.2e-13, weight=4e-12),
    "retro": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "retro-llama": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "classifier": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=8e-15),
    "ict": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=2e-14),
    "ict-shared": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=2e-14),
    # Measured: 7.1e-15, 5.9e-15, 3.5e-15, 9.0e-15.
    "choice": Distance(loss=2.5e-7, norm=1e-7, gradient=1.6e-14, weight=2e-14),
    # Losses and norms are reported in float32; without clipping no other number passes through it.
    # Measured: 9.5e-8, 0, 2.2e-15, 1.5e-15.
    "fp64": Distance(loss=2.5e-7, norm=1e-7, gradient=6e-15, weight=5e-15),
    # Parts of a product are rounded to 8 bits before they are summed.
    # Measured: 2.2e-4, 2.3e-3, 1.4e-2, 2.3e-3.
    "bf16": Distance(loss=6e-4, norm=6e-3, gradient=4e-2, weight=6e-3),
    # The same with 11 bits.  Measured: 3.2e-5, 7.9e-4, 1.9e-3, 3.1e-4.
    "fp16": Distance(loss=1e-4, norm=2e-3, gradient=5e-3, weight=1e-3),
}


ZERO = ("block.projection.bias", "block.final_norm.bias")
"""Weights of ICT whose gradients are zero in exact arithmetic: they move all blocks alike."""


def common_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder of this name, shared by all workers of xdist."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name


@contextmanager
def once(folder: Path) -> Iterator[bool]:
    """Create a folder, and yield True in one process, which has to write its content."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        yield not done.exists()
        done.touch()


class Results:
    """Results of the runs of one set of processes."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder, self.world_size = folder, world_size

    @classmethod
    def of(
        cls,
        cases: Mapping[str, str],
        world_size: int,
        folder: Path,
        *,
        env: Mapping[str, str],
        device: str = "cpu",
        seconds: float = 300.0,
    ) -> Results:
        """Train all cases in one set of processes, once per folder.

        Args:
            cases: Flags by name; see `worker.py`.
            world_size: Number of processes.
            folder: Folder of the results; test processes may share it.
            env: Environment of the processes.
            device: Device type to select.
            seconds: Time limit.
        """
        with once(folder) as missing:
            if missing:
                cls._run(cases, world_size, folder, env=env, device=device, seconds=seconds)
        return cls(folder, world_size)

    @staticmethod
    def _run(
        cases: Mapping[str, str],
        world_size: int,
        folder: Path,
        *,
        env: Mapping[str, str],
        device: str,
        seconds: float,
    ) -> None:
        listed = folder / "cases.json"
        listed.write_text(json.dumps(dict(cases)), encoding="utf-8")
        command = [sys.executable, str(LAUNCH), device, str(world_size), str(listed), str(folder)]
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            warm.run(command, env=env, stdout=log, stderr=log, timeout=seconds)

    def parts(self, name: str) -> list[dict[str, Any]]:
        """Return the results of each rank of a case."""
        files = [self.folder / f"{name}.{rank}.found" for rank in range(self.world_size)]
        missing = [file.name for file in files if not file.is_file()]
        assert not missing, (self.folder / "log.txt").read_text(encoding="utf-8")
        return [load(file) for file in files]

    def steps(self, name: str) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each step, after checking that all ranks agree."""
        first, *remaining = [part["steps"] for part in self.parts(name)]
        assert all(other == first for other in remaining), f"{name}: ranks differ"
        return list(first)

    def whole(self, name: str, key: str) -> dict[str, Tensor]:
        """Return whole tensors, after checking that all elements exist and replicas are equal."""
        found: dict[str, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for rank, part in enumerate(self.parts(name)):
            for tensor, shape, offset, values in part[key]:
                if tensor not in found:
                    found[tensor] = torch.zeros(shape, dtype=values.dtype)
                    tensors[tensor] = torch.zeros(shape, dtype=torch.bool)
                box = tuple(
                    slice(first, first + size)
                    for first, size in zip(offset, values.shape, strict=True)
                )
                known = tensors[tensor][box]
                same = found[tensor][box][known] == values[known]
                assert bool(same.all()), f"{name}: rank {rank} has another {tensor} ({key})"
                found[tensor][box] = values
                tensors[tensor][box] = True
        lacking = [tensor for tensor, known in tensors.items() if not bool(known.all())]
        assert not lacking, f"{name}: nobody has all of {lacking} ({key})"
        return found

    def distance(self, name: str, right: Results, right_name: str) -> Distance:
        """Return the difference between two runs."""
        pairs = list(zip(self.steps(name), right.steps(right_name), strict=True))
        loss, norm = (
            max(abs(found[i] - wanted[i]) / abs(wanted[i]) for found, wanted in pairs)
            for i in range(2)
        )
        gradient = _farthest(
            self.whole(name, "grads"), right.whole(right_name, "grads"), relative=True
        )
        weight = _farthest(
            self.whole(name, "weights"), right.whole(right_name, "weights"), relative=False
        )
        return Distance(loss, norm, gradient, weight)


def assert_equal(name: str, found: Results, alone: Results) -> None:
    """Check that a case took the steps of one process, within the limits of its kind."""
    case = Case.of(name)
    distance = found.distance(case.name, alone, case.kind)
    assert distance.within(LIMITS[case.kind]), distance


def _farthest(found: Mapping[str, Tensor], right: Mapping[str, Tensor], *, relative: bool) -> float:
    assert found.keys() == right.keys()
    worst = 0.0
    largest = {name: float(wanted.double().abs().max()) for name, wanted in right.items()}
    for name, wanted in right.items():
        off = float((found[name].double() - wanted.double()).abs().max())
        scale = largest[name] if relative else 1.0
        if relative and name in ZERO:
            off, scale = off + largest[name], max(largest.values())
        assert scale > 0, f"{name} is zero everywhere"
        worst = max(worst, off / scale)
        if math.isnan(off):
            return off
    return worst
