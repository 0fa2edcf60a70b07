"""Wrong calls of `save` and `load` of a session: each is named, with what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmcore.base.errors import LmcoreError
from lmcore.checkpoint import read_manifest


def make(hidden: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = nn.Sequential(nn.Linear(2, hidden), nn.Linear(hidden, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.5)


def other(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*part.parameters()]} for part in model.children()]


WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "another name": (
        lambda rt, path, model, optimizer: rt.load(path, net=model),
        ("has no `net`", "it has `epoch`, `model`, `optimizer`, `tensor`", "did you mean `model`?"),
    ),
    "more": (
        lambda rt, path, model, optimizer: rt.load(
            path, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer)
        ),
        ("has no `scheduler`", "did you mean `epoch`?"),
    ),
    "a tensor more": (
        lambda rt, path, model, optimizer: rt.load(path, mean=torch.zeros(2)),
        ("has no `mean`",),
    ),
    "another model": (
        lambda rt, path, model, optimizer: rt.load(path, model=make(8)[0]),
        ("model.0.weight: checkpoint float32 [4, 2], wanted float32 [8, 2]", "build the model as"),
    ),
    "a smaller model": (
        lambda rt, path, model, optimizer: rt.load(path, model=model[:1]),
        ("has 2 tensors that this Sequential has not", "`model.1.bias`, `model.1.weight`"),
    ),
    "an optimizer of some parameters": (
        lambda rt, path, model, optimizer: rt.load(
            path, model=model, optimizer=torch.optim.Adam(model[0].parameters())
        ),
        ("`optimizer` of checkpoint", "has 2 tensors that this Adam has not", "`model.1.bias`"),
    ),
    "another optimizer": (
        lambda rt, path, model, optimizer: rt.load(path, model=model, optimizer=other(model)),
        ("is Adam, not SGD", "leave `optimizer` out of `load`"),
    ),
    "other groups": (
        lambda rt, path, model, optimizer: rt.load(
            path, model=model, optimizer=torch.optim.Adam(parameter_groups(model))
        ),
        ("has 1 parameter group, and Adam has 2",),
    ),
    "no optimizer": (
        lambda rt, path, model, optimizer: rt.load(path, model=model, epoch=optimizer),
        ("`epoch` of checkpoint", "is a value, not an optimizer", "`load` was given Adam"),
    ),
    "no model": (
        lambda rt, path, model, optimizer: rt.load(path, model=optimizer),
        ("`model` of checkpoint", "is a model, not an optimizer"),
    ),
    "no value": (
        lambda rt, path, model, optimizer: rt.load(path, model=model, epoch=object()),
        ("`load(epoch=...)` of object", 'values["epoch"]'),
    ),
    "empty path": (
        lambda rt, path, model, optimizer: rt.save("", model=model),
        ("`save('')`: the path is empty", "a variable may be unset"),
    ),
    "empty path of load": (
        lambda rt, path, model, optimizer: rt.load(" ", model=model),
        ("`load(' ')`: the path is empty",),
    ),
    "nothing": (
        lambda rt, path, model, optimizer: rt.load(path / "no", model=model),
        ("no such directory",),
    ),
    "no checkpoint": (
        lambda rt, path, model, optimizer: rt.load(path.parent / "empty", model=model),
        ("no checkpoint in",),
    ),
    "no directory": (
        lambda rt, path, model, optimizer: rt.save(path.parent / "file", model=model),
        (
            "could not save the checkpoint",
            "why: File exists: `",
            "intact; choose another directory\n",
        ),
    ),
    "no identifier": (
        lambda rt, path, model, optimizer: rt.save(path, **{"a.b": model}),
        ("`save(**{'a.b': ...})`: the name is no identifier",),
    ),
    "taken": (lambda rt, path, model, optimizer: rt.save(path, rng=model), ("is taken",)),
    "no JSON": (
        lambda rt, path, model, optimizer: rt.save(path, x=[1, {"y": object()}]),
        ("`save` of object, `x.1.y`", "nor a JSON value"),
    ),
    "a key": (
        lambda rt, path, model, optimizer: rt.save(path, x={(1, 2): 3}),
        ("with the key (1, 2), `x`", "no key of type tuple"),
    ),
    "a name twice": (
        lambda rt, path, model, optimizer: rt.save(
            path, x={"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
        ),
        ("two tensors have the name `x.a.b`",),
    ),
    "no checkpoint kept": (
        lambda rt, path, model, optimizer: rt.save(path, model=model, keep_last=0),
        ("`save(keep_last=0)`: expected a number, 1 up",),
    ),
    "a path of None": (
        lambda rt, path, model, optimizer: rt.save(None, model=model),
        ("`save(None)`: expected the path of a directory",),
    ),
    "no optimizer's model": (
        lambda rt, path, model, optimizer: rt.save(path, optimizer=optimizer),
        ("of no model that is given",),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(start: Any, tmp_path: Path, name: str) -> None:
    """The message says which; the model is unchanged."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    rt.backward(model(torch.ones(3, 2)).mean())
    rt.step(optimizer)
    path = tmp_path / "run"
    rt.save(path, model=model, optimizer=optimizer, epoch=3, tensor=torch.ones(2))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    call, messages = WRONG[name]
    with pytest.raises(LmcoreError) as error:
        call(rt, path, model, optimizer)
    for message in messages:
        assert message in f"{error.value.render()}\n"
    assert all(map(torch.equal, before, model.parameters()))


def test_objects_may_be_left_out(start: Any, tmp_path: Path) -> None:
    """Values of the checkpoint are returned, without an optimizer's."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    rt.save(tmp_path, model=model, optimizer=optimizer, epoch=3)
    assert rt.load(tmp_path, model=model) == {"epoch": 3}
    assert rt.load(tmp_path) == {"epoch": 3}


def test_part_of_a_model(start: Any, tmp_path: Path) -> None:
    """It is saved under its own name, and loaded without the other part."""
    rt = start()
    model = rt.prepare(make()[0])
    rt.save(tmp_path, body=model[0], head=model[1])
    other = nn.Linear(2, 4)
    rt.load(tmp_path, body=other)
    assert torch.equal(other.weight, model[0].weight)


def test_damaged_checkpoints_are_named(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load of an older checkpoint is said on stderr, with the damage of the newest."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    for _ in range(2):
        rt.backward(model(torch.ones(3, 2)).mean())
        rt.step(optimizer)
        saved = rt.save(tmp_path, model=model)
    damaged = next(saved.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    rt.load(tmp_path, model=model)
    errors = capsys.readouterr().err
    assert "warning: damaged checkpoints in" in errors
    assert f"`{saved.name}`: file `{damaged.name}`" in errors
    assert f"loaded {tmp_path / 'iter_0000001'}\n" in errors


def test_an_optimizer_before_its_first_step(start: Any, tmp_path: Path) -> None:
    """Its state is empty again, so that the same steps follow."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    rt.save(tmp_path, model=model, optimizer=optimizer)
    weights = []
    for _ in range(2):
        rt.backward(model(torch.ones(3, 2)).mean())
        rt.step(optimizer)
        weights.append(model[0].weight.detach().clone())
        rt.load(tmp_path, model=model, optimizer=optimizer)
        assert not any(optimizer.state.values())
    assert torch.equal(*weights)


def test_values_come_back_equal(start: Any, tmp_path: Path) -> None:
    """Also infinite numbers, integers as keys and tensors; with and without placeholders."""
    rt = start()
    (model,) = [rt.prepare(nn.Linear(2, 2))]
    values = {
        "epoch": 3,
        "best": float("inf"),
        "worst": {"of epoch": {1: -float("inf"), 2: float("nan")}, "flags": [True, None]},
        "mean": {"layer": torch.arange(3.0), "count": 5},
    }
    rt.save(tmp_path, model=model, **values)
    for found in (
        rt.load(tmp_path, model=model, epoch=0, best=0.0, worst={}, mean={}),
        rt.load(tmp_path, mean=None),
    ):
        assert torch.equal(found["mean"].pop("layer"), torch.arange(3.0))
        assert math.isnan(found["worst"]["of epoch"].pop(2))
        assert found == {
            "epoch": 3,
            "best": float("inf"),
            "worst": {"of epoch": {1: -float("inf")}, "flags": [True, None]},
            "mean": {"count": 5},
        }
    assert "mean" not in rt.load(tmp_path, epoch=0)


def test_a_scheduler_keeps_its_milestones(start: Any, tmp_path: Path) -> None:
    """They are the keys of a mapping, and integers."""
    rt = start()
    _, optimizer = rt.prepare(*make())
    first, second = (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones) for milestones in ([2], [9])
    )
    rt.save(tmp_path, scheduler=first)
    rt.load(tmp_path, scheduler=second)
    assert second.state_dict()["milestones"] == {2: 1}


def nested(*, compiled: bool) -> nn.Module:
    """Return a model whose second layer, and which itself, may be compiled."""
    layers = [nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))]
    if not compiled:
        return nn.Sequential(*layers)
    layers[1][0] = torch.compile(layers[1][0], backend="eager")
    return torch.compile(nn.Sequential(*layers), backend="eager")


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_compiled_model_has_the_names_of_the_plain_one(
    start: Any, tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either loads the other's weights and optimizer, and earlier versions' checkpoints."""
    rt = start()

    def make(compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nested(compiled=compiled)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        rt.backward(model(torch.ones(3, 2)).mean())
        rt.step(optimizer)
        return model, optimizer

    model, optimizer = make(compiled)
    saved = [rt.save(tmp_path / "new", model=model, optimizer=optimizer, ema=model.state_dict())]
    names = {name for name in read_manifest(saved[0]).tensors if not name.startswith("ema")}
    assert "optimizer.exp_avg.model.1.0.weight" in names
    assert not any("_orig_mod" in name for name in names)
    with monkeypatch.context() as patch:
        patch.setattr("lmcore.library.saved_tensors.plain_name", lambda name: name)
        saved += [rt.save(tmp_path / "old", model=model, optimizer=optimizer)]
    for path in saved:
        other, its_optimizer = make(not compiled)
        rt.load(path, model=other, optimizer=its_optimizer)
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, same)
            moments = optimizer.state[one]["exp_avg"], its_optimizer.state[same]["exp_avg"]
            assert torch.equal(*moments)
