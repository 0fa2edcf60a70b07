"""A session of one process: arguments, placement, exchanges, and the end."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from user_loop import make

import lmcore
from lmcore.base.errors import ConfigError, DeviceError
from lmcore.contract import Compilations
from lmcore.plugin import hook_calls


def test_metrics_of_one_process(start: Any) -> None:
    """Each structure comes back with the samples of the batch, in the loop over a loader only."""
    rt = start()
    x = torch.arange(6.0).view(3, 2)
    for _ in rt.loader([x]):
        found = rt.gather_for_metrics({"x": x, "loss": x.sum(), "text": ("a", "b"), "n": 3})
        assert torch.equal(found["x"], x)
        assert found["loss"].tolist() == [15.0]
        assert (found["text"], found["n"]) == (["a", "b"], [3])
        with pytest.raises(ConfigError, match="`gather_for_metrics` of list"):
            rt.gather_for_metrics(_Unsaved())
    with pytest.raises(ConfigError, match="no batch of a loader is in use"):
        rt.gather_for_metrics(x)
    with pytest.raises(ConfigError, match="of nothing"):
        rt.loader()


def test_exchanges_with_one_process(start: Any) -> None:
    """Values come back as they are, as new tensors."""
    rt = start()
    x = torch.arange(3.0)
    assert torch.equal(rt.all_reduce(x), x)
    assert rt.all_reduce({"loss": 2.0, "counts": [1, x]}, "sum")["loss"] == 2.0
    assert rt.all_gather(x).shape == (1, 3)
    assert rt.all_gather({"a": (1, {2: 3})}) == [{"a": [1, {"2": 3}]}]  # as between processes
    assert isinstance(rt.all_reduce(5), float)
    assert rt.broadcast("text") == "text"
    rt.barrier()
    assert (rt.rank, rt.world_size, rt.is_main, rt.device.type) == (0, 1, True, "cpu")
    assert rt.describe()["device"]["type"] == "cpu"
    assert rt.memory()["allocated"] > 0
    with rt.range("name"), rt.rng.preserved():
        pass


def test_compilations(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sees what the device has compiled; the CPU compiles nothing."""
    rt = start()
    assert rt.compilations() is None
    compiled = iter((Compilations(2, 0.5), Compilations(3, 1.5)))
    device = dataclasses.replace(rt._runtime.device, compilations=lambda: next(compiled))
    monkeypatch.setattr(rt, "_runtime", dataclasses.replace(rt._runtime, device=device))
    before = rt.compilations()
    assert rt.compilations().since(before) == Compilations(1, 1.0)


def test_recomputing_changes_nothing_else(start: Any) -> None:
    """Gradients with `full` and `selective` are those without, dropout included; of copies, too."""
    rt = start()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
            out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
            return functional.dropout(out.transpose(1, 2).flatten(2), 0.2)

    def gradient(policy: str | None, *, copied: bool = False) -> torch.Tensor:
        torch.manual_seed(3)
        module = Attention()
        if policy:
            rt.recompute(module, policy)
        if copied:
            first, module = module, copy.deepcopy(module)
            nn.init.zeros_(first.project.weight)
            assert inspect.signature(module.forward).parameters.keys() == {"x"}
        module(torch.ones(2, 5, 8)).square().sum().backward()
        return module.project.weight.grad

    expected = gradient(None)
    for policy in ("full", "selective"):
        assert torch.equal(gradient(policy), expected)
        assert torch.equal(gradient(policy, copied=True), expected)
    module = Attention()
    rt.recompute(module, "full")
    with pytest.raises(ConfigError, match="has policy `full`"):
        rt.recompute(module, "full")
    with pytest.raises(ConfigError, match="does not offer it"):
        rt.recompute(Attention(), "ful")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"precison": "bf16"}, "did you mean `precision`?"),
        ({"precision": "bf17"}, "`--precision bf17`: the device does not offer it"),
        ({"num_threads": 0}, "`lmcore.start(num_threads=0)`"),
        ({"zero_stage": 4}, "`lmcore.start(zero_stage=4)`"),
        ({"zero_stage": "3"}, "expected an integer >= 0 and <= 3, not text"),
        ({"seed": "3"}, "expected an integer >= 0 and <= 4294967295, not text"),
        ({"strict_ops": "yes"}, "expected true or false, not text"),
        ({"device": torch.device("cpu", 1)}, "`device=torch.device('cpu')`"),
        ({"device": 0}, "`lmcore.start(device=0)`: expected text"),
        ({"micro_batch_size": 2}, "does not apply to a loop of your own"),
        ({"seed": "x"}, "`lmcore.start(seed='x')`"),
    ],
)
def test_wrong_arguments(start: Any, settings: dict[str, Any], message: str) -> None:
    """Each is named as it was written, and nothing stays open."""
    with pytest.raises(ConfigError) as error:
        start(**settings)
    assert message in error.value.render()
    start()


def test_a_torch_device(start: Any) -> None:
    """Its type counts."""
    assert start(device=torch.device("cpu")).device.type == "cpu"


def test_an_unknown_device(start: Any) -> None:
    """It is an error with the devices that there are."""
    with pytest.raises(DeviceError, match="nosuch"):
        start(device="nosuch")


def test_one_session_at_a_time(start: Any) -> None:
    """A second one names the line of the first; after the end of the first it opens."""
    with start() as rt:
        with pytest.raises(ConfigError) as error:
            start()
        assert f"{__file__}, line" in error.value.render() or "conftest.py" in error.value.render()
    model, optimizer = make()
    for use in (
        lambda: rt.prepare(model),
        lambda: rt.loader([]),
        lambda: rt.accumulate(2),
        lambda: rt.backward(torch.ones(())),
        lambda: rt.step(optimizer),
        lambda: rt.all_reduce(1.0),
        lambda: rt.all_gather(1.0),
        lambda: rt.gather_for_metrics(1.0),
        lambda: rt.broadcast(1.0),
        rt.barrier,
        lambda: rt.save("x", model=model),
        lambda: rt.load("x", model=model),
        lambda: rt.recompute(model, "full"),
        lambda: rt.use_kernels(model),
        rt.__enter__,
    ):
        with pytest.raises(ConfigError, match="the session has ended"):
            use()
    start()


def test_a_fork_leaves_the_session_open(start: Any) -> None:
    """A child that ends within the block does not end the session of its parent."""
    rt = start()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(SystemExit), rt:
            sys.exit(0)
        os._exit(3 if rt._resources._exit_callbacks else 4)  # type: ignore[attr-defined]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert rt.all_reduce(1.0) == 1.0


class _Unsaved:
    pass


def test_tensors_on_two_devices(start: Any) -> None:
    """Torch's error gets a hint, if it ends the session."""
    message = "Expected all tensors to be on the same device, but found two"
    with pytest.raises(RuntimeError) as error, start():
        raise RuntimeError(message)
    assert "take batches of `rt.loader(loader)`" in error.value.__notes__[0]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda rt, model, optimizer: rt.prepare(model), "is prepared already"),
        (lambda rt, model, optimizer: rt.prepare(nn.Sequential(model)), "a part of this"),
        (lambda rt, model, optimizer: rt.prepare(optimizer), "is prepared already"),
        (lambda rt, model, optimizer: rt.prepare([model]), "`prepare` of list"),
        (
            lambda rt, model, optimizer: rt.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters())),
            "has a parameter [2, 2] of no prepared model",
        ),
        (
            lambda rt, model, optimizer: rt.prepare(nn.Linear(2, 2, device="meta")),
            "is on the meta device",
        ),
        (lambda rt, model, optimizer: rt.prepare(nn.LazyLinear(2)), "`weight` has no shape yet"),
        (lambda rt, model, optimizer: rt.prepare(nn.Linear(2, 2).half()), "`weight` is float16"),
        (lambda rt, model, optimizer: rt.use_kernels("model"), "`str` is no `torch.nn.Module`"),
        (lambda rt, model, optimizer: rt.all_reduce(1.0, "avg"), "unknown operation"),
        (lambda rt, model, optimizer: rt.all_reduce("x"), "`all_reduce` of str"),
        (lambda rt, model, optimizer: rt.all_reduce(torch.ones(2).int()), "mean of integers"),
        (lambda rt, model, optimizer: rt.all_gather(_Unsaved()), "are not pickled"),
        (lambda rt, model, optimizer: rt.broadcast(1, source=1), "no such rank"),
    ],
)
def test_wrong_use(start: Any, wrong: Any, message: str) -> None:
    """Each is an error that says what is wrong."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    with pytest.raises(ConfigError) as error:
        wrong(rt, model, optimizer)
    assert message in error.value.render()


def test_a_closed_session_leaves_no_process_group(start: Any) -> None:
    """`close` may be called again."""
    rt = start(seed=5)
    rt.close()
    rt.close()
    assert not torch.distributed.is_initialized()


def test_plugins_name_their_variables_once(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lmcore_launch_env` runs once per plugin; variables set after torch's import are logged."""
    calls: list[str] = []

    def launch_env_of(record: Any, *_: Any) -> dict[str, str]:
        calls.append(record.name)
        return {"OWN_VARIABLE": "1"}

    monkeypatch.setattr(hook_calls, "_launch_env_of", launch_env_of)
    monkeypatch.setattr("lmcore.library.start.CPU", "another device type")
    start()
    assert calls
    assert len(calls) == len({*calls})
    message = "torch was imported before OWN_VARIABLE was set; `lmcore run` sets it first"
    assert message in capsys.readouterr().err


def test_the_package_is_lazy() -> None:
    """`import lmcore` loads no torch, and has the public names."""
    script = "import sys, lmcore; print('torch' in sys.modules, *dir(lmcore))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", *sorted(lmcore.__all__)]
    with pytest.raises(AttributeError, match="no attribute `stat`"):
        _ = lmcore.stat
