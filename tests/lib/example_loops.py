"""The examples of the library in a session, and their loops in plain torch.

As a program, `example_loops.py FOLDER CASE ...`, it is one rank of a run of several examples.  With
PLAIN=1 the loops are in plain torch.  The losses are written to FOLDER/RANK.json after each
case.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, RandomSampler

import lmcore
from lmcore.library.batch_order import seed_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/library"
TEXT = "To be, or not to be, that is the question:\n" * 40
WINDOWS = {"text": TEXT, "steps": 4, "length": 32}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bare_loop": ("bare_loop", {"epochs": 1}, {}),
    "character_gpt": ("character_gpt", WINDOWS, {}),
    "character_gpt, ZeRO 3": ("character_gpt", WINDOWS, {"zero_stage": 3}),
    "convolution": ("convolution", {"epochs": 1}, {}),
    "convolution, ZeRO 1": ("convolution", {"epochs": 1}, {"zero_stage": 1}),
    "finetune_llama": ("finetune_llama", WINDOWS, {}),
    "finetune_llama, kernels": ("finetune_llama", {**WINDOWS, "kernels": True}, {}),
    "moving/accelerate_after": ("moving/accelerate_after", {"epochs": 1, "folder": "a"}, {}),
    "moving/fabric_after": ("moving/fabric_after", {"epochs": 1, "folder": "f"}, {}),
}
"""Cases by name: the example, the arguments of its `train`, and settings of the session."""


def example(name: str) -> ModuleType:
    """Return an example as a module: `bare_loop`, `moving/fabric_after`."""
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PlainLoop:
    """The part of a session that the examples use, in plain torch on the host.

    With several ranks torch.distributed is initialized already.  The order of the batches is
    lmcore's; nothing else is.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        connected = distributed.is_initialized()
        self.rank = distributed.get_rank() if connected else 0
        self.world_size = distributed.get_world_size() if connected else 1
        self.updates, self.updated = 0, False
        self._steps, self._done, self._left = 1, 0, -1

    def prepare(self, *objects: Any) -> Any:
        return objects

    def loader(self, loader: DataLoader[Any]) -> Iterable[Any]:
        plain, epochs = self, iter(range(10**6))

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                rounds = loader if plain.world_size == 1 else plain._share(loader, next(epochs))
                plain._left = len(rounds)
                for batch in rounds:
                    plain._left -= 1
                    yield batch

        return Loader()

    def _share(self, loader: DataLoader[Any], epoch: int) -> list[Any]:
        """Return this rank's batches of an epoch."""
        generator = torch.Generator().manual_seed(seed_of(0, epoch))
        order: Iterable[int] = range(len(loader.dataset))  # type: ignore[arg-type]
        if isinstance(loader.sampler, RandomSampler):
            order = torch.randperm(len(loader.sampler), generator=generator).tolist()
        samples = [loader.dataset[index] for index in order]
        batches = list(DataLoader(samples, batch_size=loader.batch_size))  # type: ignore[arg-type]
        while len(batches) % self.world_size:
            batches.append(batches[len(batches) % self.world_size])
        return batches[self.rank :: self.world_size]

    def autocast(self) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def accumulate(self, steps: int) -> Iterator[None]:
        self._steps, self._done = steps, self._done + 1
        yield
        if self.updated:
            self._done = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        distributed.all_reduce(tensor)
        return tensor / self.world_size

    def gather_for_metrics(self, value: Tensor) -> Tensor:
        """Return the rows of all ranks, repeated samples included."""
        rows = value.detach().reshape(value.shape or (1,))
        if self.world_size == 1:
            return rows
        ranks = [torch.empty_like(rows) for _ in range(self.world_size)]
        distributed.all_gather(ranks, rows)
        return torch.cat(ranks)

    def backward(self, loss: Tensor) -> None:
        (loss / self._steps).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        self.updated = self._steps in {1, self._done} or self._left == 0
        if not self.updated:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in parameters:
            if self._steps > 1 and self._done < self._steps:
                parameter.grad.mul_(self._steps / self._done)
            parameter.grad = self.all_reduce(parameter.grad)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        self.updates += 1

    def print(self, *values: Any) -> None:
        """Print nothing."""

    def save(self, *folder: Any, **state: Any) -> None:
        """Save nothing."""

    def use_kernels(self, model: Any) -> None:
        """Leave the model as it is."""


def losses(case: str, *, plain: bool) -> tuple[str, list[float]]:
    """Return the kind of device and the losses of this rank, in float32."""
    name, options, settings = CASES[case]
    train = example(name).train
    if plain:
        result = train(PlainLoop(), **options)
        return "plain", result[0] if isinstance(result, tuple) else result
    with lmcore.start(precision="fp32", **settings) as rt:
        result = train(rt, **options)
        return rt.device.type, result[0] if isinstance(result, tuple) else result


def main(folder: str, *cases: str) -> None:
    """Run the cases one after the other."""
    plain = bool(os.environ.get("PLAIN"))
    if plain:
        places = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group("gloo", f"file://{folder}/store", None, places[1], places[0])
    file = Path(folder) / f"{os.environ['RANK']}.json"
    found = {}
    for case in cases:
        found[case] = losses(case, plain=plain)
        file.write_text(json.dumps(found), encoding="utf-8")
    if plain:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
