"""Training loops of a user's own on a session of the library, and the same loops in plain torch.

They are small forms of the examples of lmcore's repository.  As a module it runs all of them:

    lmcore run --nproc-per-node 2 -m lmcore_conformance.loops FOLDER STAGES [BACKEND]

STAGES are ZeRO stages, as `0` or `1,2,3`: all loops with stage 0, the transformer with the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lmcore

__all__ = ["LOOPS", "Loop", "plain_losses", "train", "train_epoch"]

_VOCABULARY, _WIDTH, _HEADS = 29, 24, 3


@dataclass(frozen=True)
class Loop:
    """A model, its data, and the way it is trained.

    Attributes:
        model: Returns the model, on the host.
        data: Returns inputs and targets of all samples, on the host.
        loss: Returns the loss of an output and its targets.
        batch_size: Samples of a micro-batch on one rank.
        accumulate: Micro-batches of an update.
        clip: Largest norm of gradients; None: they are not clipped.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int = 8
    accumulate: int = 1
    clip: float | None = 1.0

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model with the same weights everywhere, and its optimizer."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            model = self.model()
        # With the usual epsilon, rounding of gradients near 0 decides on whole steps.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the micro-batches of an epoch, in order."""
        return DataLoader(TensorDataset(*self.data()), batch_size=self.batch_size)


class _Layer(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, time, width] after attention and feed-forward network."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class _Transformer(nn.Module):
    """A transformer whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.norm = nn.RMSNorm(_WIDTH, eps=1e-5)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 9, 2),
    )


def _sine() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-3, 3, 96)[torch.randperm(96, generator=_generator())].unsqueeze(1)
    return x, torch.sin(x)


def _text() -> tuple[Tensor, Tensor]:
    start = torch.randint(_VOCABULARY, (96, 1), generator=_generator())
    tokens = (start + 3 * torch.arange(17)) % _VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _images() -> tuple[Tensor, Tensor]:
    images = 0.3 * torch.randn(96, 1, 12, 12, generator=_generator())
    images[::2, :, 3:9] += 1.0
    return images, torch.arange(96) % 2


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


LOOPS: Mapping[str, Loop] = MappingProxyType(
    {
        "bare": Loop(_perceptron, _sine, functional.mse_loss),
        "transformer": Loop(_Transformer, _text, _token_loss, batch_size=4, accumulate=2),
        "convolution": Loop(_convolutions, _images, functional.cross_entropy, clip=None),
    }
)
"""Loops by name."""


def train(rt: lmcore.Session, loop: Loop) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """Prepare the model of a loop, and train it for an epoch.

    Returns:
        Loss of each micro-batch of this rank, the model and its optimizer.
    """
    model, optimizer = rt.prepare(*loop.make())
    return train_epoch(rt, loop, model, optimizer), model, optimizer


def train_epoch(
    rt: lmcore.Session, loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[float]:
    """Train a prepared model for an epoch; return the loss of each micro-batch of this rank."""
    losses = []
    for x, y in rt.loader(loop.batches()):
        with rt.accumulate(loop.accumulate):
            with rt.autocast():
                loss = loop.loss(model(x), y)
            rt.backward(loss)
            rt.step(optimizer, clip=loop.clip)
        losses.append(loss.item())
    return losses


def plain_losses(loop: Loop, size: int = 1) -> list[list[float]]:
    """Return the losses of each of *size* ranks, computed in plain torch on the host."""
    model, optimizer = loop.make()
    losses: list[list[float]] = [[] for _ in range(size)]
    for updates in _grouped(loop.batches(), size * loop.accumulate):
        for index, (x, y) in enumerate(updates):
            loss = loop.loss(model(x), y)
            (loss / (size * loop.accumulate)).backward()
            losses[index % size].append(loss.item())
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _grouped(
    batches: DataLoader[tuple[Tensor, ...]], size: int
) -> Iterator[list[tuple[Tensor, ...]]]:
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []


def _exchanged(rt: lmcore.Session) -> dict[str, Any]:
    """Return what an evaluation over all ranks exchanges, as JSON."""
    is_right = torch.tensor([True, rt.rank == 0], device=rt.device)
    return {
        "sums": rt.all_reduce([rt.rank + 1, 0.5], "sum"),
        "mean": rt.all_reduce(is_right.float().mean()).item(),
        "gathered": rt.all_gather(is_right).tolist(),
        "sent": rt.broadcast(torch.full((2,), float(rt.rank), device=rt.device), 1).tolist(),
    }


def _continued(rt: lmcore.Session, loop: Loop, folder: Path) -> dict[str, list[float]]:
    """Train an epoch, save, and return the losses of the next one: at once, and after a load."""
    _, model, optimizer = train(rt, loop)
    rt.save(folder, model=model, optimizer=optimizer)
    at_once = train_epoch(rt, loop, model, optimizer)
    rt.load(folder, model=model, optimizer=optimizer)
    return {"at once": at_once, "loaded": train_epoch(rt, loop, model, optimizer)}


def _main(folder: Path, stages: str, backend: str | None) -> None:
    """Run loops on the ranks of this run; write the results of this rank as JSON."""
    found: dict[str, Any] = {}
    for stage in map(int, stages.split(",")):
        with lmcore.start(precision="fp32", distributed_backend=backend, zero_stage=stage) as rt:
            names = ("transformer",) if stage else tuple(LOOPS)
            found[f"stage {stage}"] = {
                "losses": {name: train(rt, LOOPS[name])[0] for name in names},
                "exchanged": _exchanged(rt),
                "continued": _continued(rt, LOOPS[names[0]], folder / str(stage)),
            }
            (folder / f"{rt.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
