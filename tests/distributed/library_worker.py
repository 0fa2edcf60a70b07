"""One rank of a session, as `conftest.py` starts it: SCENARIO, then the timeout in seconds."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

import lmcore
from lmcore.base.errors import RunError

STEPS = 4


class Classifier(nn.Module):
    """Two layers of one kind, a layer normalization, a head, and a part that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def make(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, without weight decay for the unused part."""
    torch.manual_seed(seed)
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and classes of both ranks in turn."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(2 * STEPS):
        yield torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def plain_losses() -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of one process in plain torch, with twice the batch."""
    model, optimizer = make()
    losses, norms = [], []
    pairs = list(batches())
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        total = 0.0
        for x, y in (first, second):
            loss = functional.cross_entropy(model(x), y) / 2
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def show(value: Any) -> None:
    """Print a JSON line for the test to read."""
    print(json.dumps(value), flush=True)


def session(timeout: float, **settings: Any) -> lmcore.Session:
    """Open a session in float32."""
    minutes = timeout / 60
    return lmcore.start(precision="fp32", distributed_timeout_minutes=minutes, **settings)


def loss_weights(timeout: float) -> None:
    """Train with losses that are means of different numbers of targets, in micro-batches of 2."""
    numbers = (4, 0, 1, 3, 0, 2, 2, 0)  # rank 1 has no target in the third update of two
    masked = [
        (x, torch.where(torch.arange(4) < number, y, -100))
        for (x, y), number in zip(batches(), numbers, strict=True)
    ]
    model, optimizer = make()
    for start in (0, 4):
        x, y = (torch.cat(parts) for parts in zip(*masked[start : start + 4], strict=True))
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    show([parameter.tolist() for parameter in model.parameters()])
    for stage in (0, 1, 2, 3):
        with session(timeout, zero_stage=stage) as rt:
            model, optimizer = rt.prepare(*make())
            for x, y in masked[rt.rank :: rt.world_size]:
                with rt.accumulate(2):
                    loss = functional.cross_entropy(model(x), y)
                    rt.backward(loss, weight=(y != -100).sum())
                    rt.step(optimizer)
            whole = [
                getattr(each, "full_tensor", lambda each=each: each)()
                for each in model.parameters()
            ]
            show([each.tolist() for each in whole])
            x, y = masked[1]
            rt.backward(functional.cross_entropy(model(x), y), weight=0)
            try:
                rt.step(optimizer)
            except RunError as error:
                show(error.what)


def train(timeout: float) -> None:
    """Train with each ZeRO stage, save, load into another model, and continue."""
    folder = Path(os.environ["FOLDER"])
    show(plain_losses())
    for stage in range(4):
        with session(timeout, zero_stage=stage) as rt:
            model, optimizer = rt.prepare(*make(seed=1 + rt.rank))  # rank 0's weights count
            found: dict[str, Any] = {"losses": [], "norms": []}
            for x, y in list(batches())[rt.rank :: rt.world_size]:
                loss = functional.cross_entropy(model(x), y)
                rt.backward(loss)
                norm = rt.step(optimizer, clip=0.3)
                found["losses"].append(rt.all_reduce(loss.item()))
                found["norms"].append(norm.item() if norm is not None else None)
            with torch.no_grad():
                model(x)  # as in a validation; it leaves sharded weights gathered
            saved = rt.save(folder / str(stage), model=model, optimizer=optimizer, epoch=stage)
            other, its_optimizer = rt.prepare(*make(seed=7))
            other(x)
            values = rt.load(folder / "0", model=other, optimizer=its_optimizer)
            x, y = next(batches())
            found["after"] = []
            for one, its in ((model, optimizer), (other, its_optimizer)):
                for _ in range(2):
                    loss = functional.cross_entropy(one(x), y)
                    rt.backward(loss)
                    rt.step(its)
                found["after"].append(loss.item())
            show({**found, "saved": saved.name, "values": values})
            if stage and rt.rank == 1:  # as if it never had a gradient of this parameter
                del optimizer.state[model.head.weight]
            rt.save(folder / f"part{stage}", model=model, optimizer=optimizer)
            rt.load(folder / f"part{stage}", model=model, optimizer=optimizer)
            if stage:
                average = optimizer.state[model.head.weight]["exp_avg"].to_local()
                assert bool(average.any()) == (rt.rank == 0)


class Heads(nn.Module):
    """Heads that ranks use in turn, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 3))])
        self.never = nn.Linear(8, 3)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))))


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    """Return all weights of a model, which may be sharded."""
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().flatten().tolist()
        for name, each in model.named_parameters()
    }


class Several:
    """Steps with `Heads`: the reference of one process, or the two ranks of a session."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model = Heads()
        self.model.layers[0].requires_grad_(requires_grad=False)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        self.pairs = list(batches())

    def loss(self, step: int, rank: int) -> Tensor:
        """Return the loss of a rank; layer 0 is trained from step 1 on, layer 1 up to step 2."""
        self.model.layers[0].requires_grad_(requires_grad=step >= 1)
        self.model.layers[1].requires_grad_(requires_grad=step < 3)
        x, y = self.pairs[2 * step + rank]
        return functional.cross_entropy(self.model(x, int(step == rank)), y)


def several_heads(timeout: float) -> None:
    """Train parameters that are frozen, unfrozen, used on some ranks or never, with each stage.

    Where the installed torch cannot reduce them, show the error.
    """
    plain, norms = Several(), []
    for step in range(STEPS):
        ((plain.loss(step, 0) + plain.loss(step, 1)) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1).item())
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    show([norms, weights_of(plain.model)])
    for stage in range(4):
        with session(timeout, zero_stage=stage) as rt:
            ours, norms = Several(), []
            rt.prepare(ours.model, ours.optimizer)
            try:
                for step in range(STEPS):
                    rt.backward(ours.loss(step, rt.rank))
                    norms.append(rt.step(ours.optimizer, clip=0.1).item())
            except RunError as error:
                show(str(error))
            else:
                show([norms, weights_of(ours.model)])


def in_turn(timeout: float) -> None:
    """Use heads and models in turn within an update, with another forward pass before its step.

    The second model is used in one micro-batch of two: with stage 1 it has to be the last one.
    """
    pairs = list(batches())

    def make_both() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(4)
        models = nn.ModuleList([Heads(), nn.Linear(8, 3)])
        return models, torch.optim.SGD(models.parameters(), lr=0.5)

    def loss_of(models: nn.ModuleList, update: int, number: int, rank: int, turn: int) -> Tensor:
        x, y = pairs[4 * update + 2 * number + rank]
        logits = models[0](x, number)
        return functional.cross_entropy(logits + models[1](x) if number == turn else logits, y)

    for turn in (0, 1):
        models, optimizer = make_both()
        for update in range(2):
            for number, rank in itertools.product(range(2), range(2)):
                (loss_of(models, update, number, rank, turn) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        show(weights_of(models))
    for stage, turn in ((0, 0), (1, 1), (2, 0), (3, 0), (1, 0)):
        with session(timeout, zero_stage=stage) as rt:
            models, optimizer = make_both()
            rt.prepare(*models, optimizer)
            try:
                for update, number in itertools.product(range(2), range(2)):
                    with rt.accumulate(2):
                        rt.backward(loss_of(models, update, number, rt.rank, turn))
                        models[0](torch.ones(4, 8), 0)  # leaves sharded weights gathered
                        rt.step(optimizer)
            except lmcore.ConfigError as error:
                show(error.what)
            else:
                show(weights_of(models))


class Sharing(nn.Module):
    """A layer that occurs twice, a layer, and a layer that shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(3)]
        self.layers = nn.ModuleList([layers[0], *layers])
        self.head = nn.Linear(8, 8)
        self.head.weight = layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def sharing(timeout: float) -> None:
    """Train, save and load a model whose layers share weights; only one is sharded separately."""
    from torch.distributed.fsdp import FSDPModule

    def make_sharing() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(4)
        model = Sharing()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    plain, optimizer = make_sharing()
    for x, y in batches():
        (functional.cross_entropy(plain(x), y) / 2).backward()
    optimizer.step()
    show(weights_of(plain))
    for stage in (1, 3):
        with session(timeout, zero_stage=stage) as rt:
            model, optimizer = rt.prepare(*make_sharing())
            assert [isinstance(each, FSDPModule) for each in model.layers] == [0, 0, 1, 0]
            for x, y in list(batches())[rt.rank :: rt.world_size]:
                rt.backward(functional.cross_entropy(model(x), y))
            rt.step(optimizer)
            show(weights_of(model))
            rt.save(os.environ["FOLDER"], model=model)
            other = rt.prepare(make_sharing()[0])
            rt.load(os.environ["FOLDER"], model=other)
            show(weights_of(other))


def shared_by_models(timeout: float) -> None:
    """Train, save and load two models with one weight in common, prepared one after the other."""

    def make_both() -> list[nn.Module]:
        torch.manual_seed(5)
        models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)) for _ in range(2)]
        models[1][0].weight = models[0][0].weight
        return models

    def loss_of(models: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
        return sum((functional.cross_entropy(model(x), y) for model in models), torch.zeros(()))

    def optimizer_of(models: list[nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.1)

    plain = make_both()
    optimizer = optimizer_of(plain)
    pairs = list(batches())
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        (loss_of(plain, *first) / 2 + loss_of(plain, *second) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    show([weights_of(each) for each in plain])
    with session(timeout) as rt:
        models = make_both()
        optimizer = optimizer_of(models)
        for model in models:
            rt.prepare(model)
        rt.prepare(optimizer)
        for x, y in list(batches())[rt.rank :: rt.world_size]:
            rt.backward(loss_of(models, x, y))
            rt.step(optimizer)
        show([weights_of(each) for each in models])
        settings: Any = {"optimizer": optimizer, "a": models[0], "b": models[1]}
        rt.save(os.environ["FOLDER"], **settings)
        with torch.no_grad():
            models[0][0].weight.zero_()
        rt.load(os.environ["FOLDER"], **settings)
        show([weights_of(each) for each in models])
    with session(timeout, zero_stage=1) as rt:
        try:
            rt.prepare(*make_both())
        except lmcore.ConfigError as error:
            show(error.what)


def hooks(timeout: float) -> None:
    """Train with hooks on a parameter's gradient, made before and after `prepare`, then removed."""
    calls: list[str] = []
    for stage in (0, 1, 3):
        with session(timeout, zero_stage=stage) as rt:
            model, optimizer = make()
            weight, bias = model.head.weight, model.head.bias
            calls.clear()
            handle = weight.register_hook(lambda grad: grad * 2)
            bias.register_hook(lambda _: calls.append("tensor"))
            bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
            rt.prepare(model, optimizer)
            assert not calls, "called in the check of the precision"
            model.head.weight.register_hook(lambda grad: grad + 1)
            for x, y in list(batches())[rt.rank :: rt.world_size]:
                rt.backward(functional.cross_entropy(model(x), y))
                rt.step(optimizer)
                handle.remove()
            show(weights_of(model))
            assert calls == ["tensor", "accumulated"] * STEPS, calls
            if stage:
                x.requires_grad_()
                output = model(x).sum()
                try:
                    torch.autograd.grad(output, x, create_graph=True)
                except lmcore.ConfigError as error:
                    show(error.what)


def optimizers(timeout: float) -> None:
    """Step with state that the constructor made, and show what is refused with sharding."""
    plain, _ = make()
    model, _ = make()
    stepped = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    x, y = next(batches())
    functional.cross_entropy(plain(x), y).backward()
    stepped.step()
    show(weights_of(plain))
    with session(timeout, zero_stage=3) as rt:
        rt.prepare(model, optimizer)
        rt.backward(functional.cross_entropy(model(x), y))
        rt.step(optimizer)
        show(weights_of(model))
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop):
            try:
                rt.prepare(kind(model.parameters()))
            except lmcore.ConfigError as error:
                show(error.what)
        weights = (
            torch.ones(2, 2, dtype=torch.complex64),
            torch.tensor(1.0),
            torch.ones(0, 2),
            torch.ones(2, 3).t(),
        )
        for weight in weights:
            layer = nn.Linear(2, 2)
            layer.weight = nn.Parameter(weight)
            try:
                rt.prepare(layer)
            except lmcore.ConfigError as error:
                show(error.what)


def averaged_weights(timeout: float) -> None:
    """Keep moving averages of sharded weights in a second prepared model, evaluate, and save it."""
    with session(timeout, zero_stage=3) as rt:
        model, optimizer = make()
        whole = [weakref.ref(parameter) for parameter in model.parameters()]
        rt.prepare(model, optimizer)
        gc.collect()
        assert not any(parameter() is not None for parameter in whole), "whole weights are kept"
        average = rt.prepare(make()[0].requires_grad_(requires_grad=False))
        pairs = list(zip(average.parameters(), model.parameters(), strict=True))
        reference = make()[0].requires_grad_(requires_grad=False)
        for x, y in batches():
            rt.backward(functional.cross_entropy(model(x), y))
            rt.step(optimizer)
            with torch.no_grad():
                for ours, theirs in pairs:
                    ours.lerp_(theirs, 0.1)
                for name, each in model.named_parameters():
                    reference.get_parameter(name).lerp_(each.full_tensor(), 0.1)
                torch.testing.assert_close(average(x), reference(x))
        weight = model.head.weight.detach()
        saved = {"average": average, "head": weight, "more": {"double": 2 * weight}}
        rt.save(os.environ["FOLDER"], **saved)
        for head in (torch.zeros_like(weight), torch.zeros(weight.shape)):
            found = rt.load(os.environ["FOLDER"], head=head, more={})
            whole = getattr(head, "full_tensor", lambda head=head: head)()
            assert torch.equal(whole, weight.full_tensor())
            assert torch.equal(found["more"]["double"], 2 * whole)
        with contextlib.suppress(lmcore.ConfigError):
            rt.save(os.environ["FOLDER"], norm=weight.norm())
            raise AssertionError("a partial `DTensor` was saved")
        for name, each in average.named_parameters():
            torch.testing.assert_close(each.full_tensor(), reference.get_parameter(name))
    show("equal")


class OwnState:
    """An object whose state differs between the ranks."""

    def __init__(self, rank: int) -> None:
        self.state = {"tensor": torch.full((3,), float(rank)), "number": rank}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def own_values(timeout: float) -> None:
    """Save buffers, tensors and states that differ between the ranks, and show what is loaded."""
    model = nn.Sequential(nn.BatchNorm1d(8, momentum=1.0), nn.Linear(8, 3))
    with session(timeout) as rt:
        rt.prepare(model)
        with torch.no_grad():
            model(torch.arange(32.0).view(4, 8) * (1 + rt.rank))
        copy, state = make()[0], OwnState(rt.rank)
        with torch.no_grad():
            copy.head.weight.fill_(rt.rank)
        own = {"tensor": torch.full((2,), float(rt.rank)), "copy": copy, "state": state}
        before = [model[0].running_mean.tolist(), model[0].running_var.tolist()]
        rt.save(os.environ["FOLDER"], model=model, **own)
        rt.load(os.environ["FOLDER"], model=model, **own)
        assert [model[0].running_mean.tolist(), model[0].running_var.tolist()] == rt.broadcast(
            before
        )
        assert state.state["tensor"].tolist() == [0.0] * 3, state.state
        assert state.state["number"] == 0
        assert own["tensor"].tolist() == [0.0] * 2
        assert not copy.head.weight.any()
        try:
            rt.save(os.environ["FOLDER"], tensor=torch.ones(2 + rt.rank))
        except lmcore.LmcoreError as error:
            show([type(error).__name__, error.render()])


def drifted(timeout: float) -> None:
    """Save after hyperparameters, and weights too, have changed on one rank."""
    with session(timeout) as rt:
        model, optimizer = rt.prepare(*make())
        rt.backward(model(torch.ones(4, 8)).mean())
        rt.step(optimizer)
        group, weight = optimizer.param_groups[0], model.head.weight

        def noted() -> None:
            try:
                rt.save(os.environ["FOLDER"], model=model, optimizer=optimizer)
            except lmcore.RunError as error:
                show(error.render())
            assert not Path(os.environ["FOLDER"]).exists()

        group["lr"] = 0.5 + rt.rank
        noted()
        with torch.no_grad():
            weight[0, 0] = 2.0 + rt.rank
        noted()


def misuse(timeout: float) -> None:
    """Make mistakes whose weights would differ between the ranks, and show the messages."""
    x = torch.ones(4, 8)

    def noted(call: Callable[[], Any]) -> None:
        try:
            call()
        except lmcore.LmcoreError as error:
            show(error.render())
        else:
            show("no error")

    earlier = None
    for stage in (0, 2, 0):
        with session(timeout, zero_stage=stage) as rt:
            if earlier is not None:
                noted(functools.partial(rt.prepare, earlier))
            earlier = model = rt.prepare(make()[0])
            loss = model(x).mean()
            noted(loss.backward)
            noted(lambda: rt.backward(nn.Linear(8, 3)(x).mean()))
            noted(lambda: rt.prepare(nn.Sequential(nn.Embedding(4, 2, sparse=True))))
            graph = nn.Linear(2, 2)
            graph.register_buffer("edges", torch.eye(2).to_sparse())
            noted(functools.partial(rt.prepare, graph))
            noted(lambda: rt.prepare(fully_shard(nn.Linear(2, 2))))
            noted(lambda: rt.prepare(nn.Sequential(nn.Tanh() if rt.rank else nn.ReLU())))


def exchange(timeout: float) -> None:
    """Exchange tensors, numbers and JSON."""
    with session(timeout) as rt:
        x = torch.tensor([rt.rank, 5.0])
        show(
            {
                "mean": rt.all_reduce(x).tolist(),
                "max": rt.all_reduce({"a": rt.rank, "b": [x.int()]}, "max")["a"],
                "gathered": rt.all_gather(x).tolist(),
                "scalars": rt.all_gather(x[0]).tolist(),
                "json": rt.all_gather({"rank": rt.rank}),
                "sent": rt.broadcast(x, source=1).tolist(),
                "text": rt.broadcast("from 1" if rt.rank else object(), source=1),
            }
        )
        rt.print('"once"', flush=True)


def metrics(timeout: float) -> None:
    """Gather the samples of loaders whose last round repeats some, with tensors of all kinds."""
    with session(timeout) as rt:
        for count in (4, 6, 7, 11):
            found: list[Any] = []
            for batch in rt.loader(DataLoader(torch.arange(count), batch_size=2)):
                pairs = torch.stack([batch, batch + 100], 1)
                results = {"pair": pairs, "even": batch % 2 == 0, "texts": [*map(str, batch)]}
                gathered = rt.gather_for_metrics((results, batch.float().mean()))
                rows = zip(*gathered[0]["pair"].T.tolist(), gathered[0]["even"], strict=True)
                found += [[*numbers, bool(even)] for *numbers, even in rows]
                assert len(gathered[0]["texts"]) == len(gathered[0]["even"])
                assert gathered[1].shape == (-(-len(gathered[0]["even"]) // 2),)
            show(found)
        for batch in rt.loader([torch.ones(2, 3)] * rt.world_size):
            rt.gather_for_metrics(batch[:, rt.rank :])


def fail(timeout: float) -> None:
    """Raise on rank 1 within the block."""
    with session(timeout) as rt:
        model, optimizer = rt.prepare(*make())
        for step, (x, y) in enumerate(batches()):
            if step == 2 and rt.rank == 1:
                raise ValueError("the third batch is bad")
            rt.backward(functional.cross_entropy(model(x), y))
            rt.step(optimizer)


def other_model(timeout: float) -> None:
    """Prepare models that differ."""
    with session(timeout) as rt:
        rt.prepare(nn.Linear(4, 4 + rt.rank))


def uneven(timeout: float) -> None:
    """Take one step more on rank 1."""
    with session(timeout) as rt:
        model, optimizer = rt.prepare(*make())
        for x, y in list(batches())[: 3 + rt.rank]:
            rt.backward(functional.cross_entropy(model(x), y))
            rt.step(optimizer)


X = torch.ones(3)


def left_epoch(rt: lmcore.Session) -> None:
    """Leave the first of two epochs on rank 1."""
    model, optimizer = rt.prepare(*make())
    for _ in range(2):
        for number, x in enumerate(rt.loader([torch.ones(4, 8)] * 8)):
            if number == 2 and rt.rank == 1:
                break
            rt.backward(model(x).mean())
            rt.step(optimizer)


def saved_by_rank_0(rt: lmcore.Session) -> None:
    """Save on rank 0, and compute gradients on rank 1."""
    (model,) = rt.prepare(*make())[:1]
    if rt.rank == 0:
        rt.save("never", model=model)
    rt.backward(model(torch.ones(4, 8)).mean())


def saved_by_rank_0_then_trained(rt: lmcore.Session) -> None:
    """Save on rank 0, and begin an epoch on both."""
    (model,) = rt.prepare(*make())[:1]
    if rt.rank == 0:
        rt.save("never", model=model)
    next(iter(rt.loader([X] * 8)))


def uncounted(rt: lmcore.Session) -> None:
    """Save on rank 0, and compute gradients on rank 1, by a backend that counts no operations."""
    from lmcore.library import ending
    from lmcore.runtime.process import watch

    ending.count_operations = watch.count_operations = dict  # type: ignore[attr-defined]
    saved_by_rank_0(rt)


def destroyed(rt: lmcore.Session) -> None:
    """Destroy torch's group within the session."""
    torch.distributed.destroy_process_group()
    rt.all_reduce(X)


def own_backward(rt: lmcore.Session) -> None:
    """Compute the gradients by torch's own `backward`."""
    model, optimizer = rt.prepare(*make())
    model(torch.ones(4, 8)).mean().backward()
    rt.step(optimizer)


def other_optimizer(rt: lmcore.Session) -> None:
    """Prepare optimizers that differ."""
    model = make()[0]
    rt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1 + rt.rank))


def replaced(rt: lmcore.Session) -> None:
    """Step with an optimizer of the parameters before they were sharded."""
    model, optimizer = make()
    rt.close()
    with lmcore.start(precision="fp32", zero_stage=3) as again:
        again.prepare(model)
        again.backward(model(torch.ones(4, 8)).mean())
        again.step(optimizer)


def left_stream(rt: lmcore.Session) -> None:
    """Leave epochs of unknown length on rank 1, without collectives."""
    batches = rt.loader(filter(torch.is_tensor, [torch.tensor(i) for i in range(8)]))
    for batch in batches:
        if rt.rank == 1 and batch == 3:
            break
    assert rt.all_gather(int(batch)) == [6, 3]
    raise lmcore.RunError("both went on")


CALLS: dict[str, Callable[[lmcore.Session], Any]] = {
    "shape": lambda rt: rt.all_reduce(torch.ones(4 + rt.rank)),
    "dtype": lambda rt: rt.all_gather(X.double() if rt.rank else X),
    "op": lambda rt: rt.all_reduce(X, "max") if rt.rank else rt.broadcast(X),
    "names": lambda rt: rt.all_reduce({"b": 1.0} if rt.rank else {"a": 1.0}),
    "values": lambda rt: rt.all_gather("text") if rt.rank else rt.all_reduce(1.0),
    "barrier": lambda rt: rt.barrier() if rt.rank else rt.all_reduce(X),
    "tensor": lambda rt: rt.all_reduce(X if rt.rank else torch.ones(7)),
    "backward": saved_by_rank_0,
    "saved": saved_by_rank_0_then_trained,
    "uncounted": uncounted,
    "destroyed": destroyed,
    "break": left_epoch,
    "break, no length": left_stream,
    "own backward": own_backward,
    "optimizer": other_optimizer,
    "sharded since": replaced,
}


def calls(timeout: float) -> None:
    """Make another call on rank 1, as the variable CALLS says."""
    with session(timeout) as rt:
        rt.all_reduce(X)
        CALLS[os.environ["CALLS"]](rt)
    show("ended")


def late(timeout: float) -> None:
    """Work alone on rank 0, longer than the timeout, after the last step."""
    with session(timeout) as rt:
        rt.prepare(*make())
        if rt.is_main:
            time.sleep(1.5 * timeout)
    show("ended")


def again(timeout: float) -> None:
    """Open sessions one after the other, with other values in each; the first one fails."""
    for number in range(3):
        with contextlib.suppress(ValueError), session(timeout) as rt:
            show(rt.all_gather([number, rt.rank]))
            if number == 0:
                raise ValueError("the learning rate is too high")


def left(timeout: float) -> None:
    """Leave a session open, on rank 1 earlier."""
    rt = session(timeout)
    if rt.rank == 0:
        rt.barrier()


def own_group(timeout: float) -> None:
    """Initialize torch.distributed before the session."""
    torch.distributed.init_process_group("gloo")
    session(timeout)


SCENARIOS: dict[str, Callable[[float], None]] = {
    "again": again,
    "calls": calls,
    "exchange": exchange,
    "fail": fail,
    "late": late,
    "left": left,
    "in_turn": in_turn,
    "averaged_weights": averaged_weights,
    "loss_weights": loss_weights,
    "shared_by_models": shared_by_models,
    "hooks": hooks,
    "optimizers": optimizers,
    "metrics": metrics,
    "drifted": drifted,
    "misuse": misuse,
    "several_heads": several_heads,
    "sharing": sharing,
    "other_model": other_model,
    "own_group": own_group,
    "own_values": own_values,
    "train": train,
    "uneven": uneven,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](float(sys.argv[2]))
