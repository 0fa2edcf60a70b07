"""Optimizer classes of torch and of users, by import path: steps, state, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmcore.errors import ConfigError

CLASSES = {
    "torch.optim:AdamW": ("betas=0.9,0.95", "amsgrad=true"),
    "torch.optim:NAdam": ("momentum_decay=0.01",),
    "torch.optim:SGD": (),
    "torch.optim:ASGD": ("t0=3",),
    "torch.optim:Adagrad": (),
    "torch.optim:Adafactor": (),
    "own:Nested": (),
}
ELEMENTWISE = ("torch.optim:AdamW", "torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:SGD")
OWN = '''
import torch

class Nested(torch.optim.Optimizer):
    """Sign of the momentum; state in lists and numbers, a count in the group, drops gradients."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["scale"] = group.get("scale", 1.0) * 0.9
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moments"] = [torch.zeros_like(p), None]
                    state["numbers"] = {0: 0.5, "seen": False, "done": {0, 1}, "kind": "sign"}
                state["moments"][0].lerp_(p.grad, 0.1)
                state["numbers"][0] *= 0.99
                state["numbers"]["seen"] = True
                size = group["lr"] * state["numbers"][0] * group["scale"] / group["k"]
                p.sub_(state["moments"][0].sign(), alpha=size)
                p.grad = None

class Outside(Nested):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.count = 0

    def step(self, closure=None):
        self.count += 1

class Words(Nested):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["object"] = object()

class Changing(Nested):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["name"] = str(self.state[p]["numbers"][0])

class Norm(Nested):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])

class Broken:
    pass
'''


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a user's module on the path."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "faulty.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)


def make(bench: Any, path: str, named: dict[str, nn.Parameter], *args: str, **more: Any) -> Any:
    return bench.make(path, named, optimizer_args=args, **more)


@pytest.mark.parametrize("path", CLASSES)
def test_goes_on_to_the_bit(bench: Any, path: str) -> None:
    """Weights and state copied into a fresh optimizer go on as if nothing had happened."""
    unbroken = bench.weights()
    bench.advance(unbroken, make(bench, path, unbroken, *CLASSES[path]), range(8))
    first = bench.weights()
    trained = make(bench, path, first, *CLASSES[path])
    bench.advance(first, trained, range(4))
    trained.eval_mode()
    saved = {key: tensor.clone() for key, tensor in trained.state_tensors().items()}
    trained.train_mode()
    second = bench.weights(seed=9)
    fresh = make(bench, path, second, *CLASSES[path])
    fresh.eval_mode()
    state = fresh.state_tensors()
    assert {key: (one.shape, one.dtype) for key, one in state.items()} == {
        key: (one.shape, one.dtype) for key, one in saved.items()
    }
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(saved[key])
        for key, parameter in second.items():
            parameter.copy_(first[key])
    fresh.train_mode()
    for named, optimizer in ((first, trained), (second, fresh)):
        bench.advance(named, optimizer, range(4, 8))
        assert all(torch.equal(named[key], unbroken[key]) for key in unbroken)
        assert all(parameter.grad is not None for parameter in named.values())


def test_saved_before_the_first_step(bench: Any) -> None:
    """A checkpoint of step 0 has the state's structure, and loading it begins as a new run does."""
    named, unbroken = bench.weights(), bench.weights()
    optimizer = make(bench, "torch.optim:NAdam", named)
    optimizer.eval_mode()
    state = optimizer.state_tensors()
    assert set(state) >= {f"{kind}.{key}" for kind in ("exp_avg", "mu_product") for key in named}
    assert not any(tensor.any() for tensor in state.values())
    optimizer.train_mode()
    bench.advance(named, optimizer, range(3))
    bench.advance(unbroken, make(bench, "torch.optim:NAdam", unbroken), range(3))
    assert all(torch.equal(named[key], unbroken[key]) for key in named)


def test_equals_a_plain_loop(bench: Any) -> None:
    """NAdam with the run's rate and decay is torch's own loop, to the bit."""
    named, plain = bench.weights(), bench.weights()
    bench.advance(named, make(bench, "torch.optim:NAdam", named, "betas=(0.8, 0.99)"), range(9))
    groups = [
        {"params": [p for p in plain.values() if (p.ndim > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    loop = torch.optim.NAdam(groups, betas=(0.8, 0.99))
    for step in range(9):
        for name, gradient in bench.gradients(step).items():
            plain[name].grad = gradient
        for group in loop.param_groups:
            group["lr"] = bench.rate(step)
        loop.step()
    assert all(torch.equal(named[key], plain[key]) for key in named)


def test_adamw_agrees_with_ours(bench: Any) -> None:
    """Torch's AdamW moves the weights as `adam` does, but for rounding."""
    ours, torchs = bench.weights(), bench.weights()
    bench.advance(ours, bench.make("adam", ours), range(9))
    bench.advance(torchs, make(bench, "torch.optim:AdamW", torchs, "betas=0.9,0.95"), range(9))
    for key, weight in ours.items():
        torch.testing.assert_close(torchs[key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", ELEMENTWISE)
def test_parts_move_as_the_whole_does(bench: Any, path: str) -> None:
    """Rows of a parameter are updated as they are within the whole."""
    whole = bench.weights()
    bench.advance(whole, make(bench, path, whole, optimizer_elementwise=True), range(6))
    rows = slice(0, 11)
    parts = {key: nn.Parameter(p.detach()[rows].clone()) for key, p in bench.weights().items()}
    optimizer = make(bench, path, parts, optimizer_elementwise=True)
    for step in range(6):
        for key, gradient in bench.gradients(step).items():
            parts[key].grad = gradient[rows]
        optimizer.step(bench.rate(step))
    for key, part in parts.items():
        torch.testing.assert_close(part, whole[key][rows], rtol=1e-6, atol=1e-7)


def test_stage_without_parameters(bench: Any) -> None:
    """A process that trains nothing takes its step with the others."""
    optimizer = make(bench, "torch.optim:AdamW", {})
    optimizer.step(0.1)
    optimizer.eval_mode()
    assert optimizer.state_tensors() == {}
    optimizer.train_mode()


@pytest.mark.parametrize(
    "path, args, more, what, remedy",
    [
        ("nowhere:A", (), {}, "no such module", "PYTHONPATH"),
        ("torch.nowhere:A", (), {}, "no such module", "PYTHONPATH"),
        ("faulty:A", (), {}, "cannot be imported", "import faulty"),
        ("torch.optim:NAdm", (), {}, "has no `NAdm`", "did you mean `NAdam`"),
        ("own:Broken", (), {}, "is not an optimizer", "`Nested`"),
        ("torch.optim:Optimizer", (), {}, "is not an optimizer", "`AdamW`"),
        ("torch.optim:LBFGS", (), {}, "needs a closure", "without a closure"),
        ("torch.optim:SparseAdam", (), {"weight_decay": 0.0}, "cannot take a step", "dense"),
        ("torch.optim:Rprop", (), {}, "has no weight decay", "--weight-decay 0"),
        ("torch.optim:Muon", (), {}, "cannot be created", "--optimizer-args"),
        ("torch.optim:AdamW", ("betas=3,4",), {}, "cannot be created", "--optimizer-args"),
        ("torch.optim:AdamW", ("beta=3",), {}, "no argument `beta`", "did you mean `betas`"),
        ("torch.optim:AdamW", ("eps",), {}, "is not an argument", "key=value"),
        ("torch.optim:AdamW", ("eps=1", "eps=2"), {}, "given twice", ""),
        ("torch.optim:AdamW", ("lr=1",), {}, "the run sets `lr`", ""),
        ("own:Outside", (), {}, "state outside of", "another class"),
        ("own:Words", (), {}, "of type object", "another class"),
        ("own:Changing", (), {}, "change from step to step", "another class"),
        ("own:Norm", (), {"optimizer_elementwise": True}, "not elementwise", "leave"),
        ("torch.optim:Adafactor", (), {"optimizer_elementwise": True}, "`row_var` of", "leave"),
    ],
)
def test_refused(
    bench: Any, path: str, args: tuple[str, ...], more: dict[str, Any], what: str, remedy: str
) -> None:
    """What cannot train is refused when the optimizer is created, with the remedy."""
    with pytest.raises(ConfigError) as caught:
        make(bench, path, bench.weights(), *args, **more)
    assert what in caught.value.what
    assert remedy in str(caught.value.hint or "")
