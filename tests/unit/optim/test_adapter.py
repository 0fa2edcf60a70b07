"""Optimizer classes of torch and of users, by import path: steps, state, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmcore.base.errors import ConfigError
from lmcore.contract.torch_versions import MUON
from lmcore.optim.class_trial import create_torch_optimizer
from lmcore.optim.optimizer import parameter_groups

CLASSES = {
    "torch.optim:AdamW": ("betas=0.9,0.95", "amsgrad=true"),
    "torch.optim:NAdam": ("momentum_decay=0.01",),
    "torch.optim:SGD": (),
    "torch.optim:ASGD": ("t0=3",),
    "torch.optim:Adagrad": (),
    "torch.optim:Adafactor": (),
    "own:Nested": (),
    "own:Count": (),
    "own:InDictionaries": (),
    "own:FirstNone": (),
    "own:DefaultDictionary": (),
    "own:FirstRate": (),
    "own:Late": (),
}
MUON_CLASS = ("torch.optim:Muon", (), {}, "cannot be created", "--optimizer-args")
ELEMENTWISE = ("torch.optim:AdamW", "torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:SGD")
OWN = '''
import collections
import itertools

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

class Base(torch.optim.Optimizer):
    """Sign of the gradient, times a factor that differs from step to step."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.count = 0
        self.inner = {"deep": {}}

    def factor(self, group, state, p):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                factor = self.factor(group, self.state[p], p)
                p.sub_(p.grad.sign(), alpha=group["lr"] * factor)

class Count(Base):
    def factor(self, group, state, p):
        self.count += 1
        return 1 / self.count

class InDictionaries(Base):
    """As the preconditioners' schedule of some packages: every third step has another factor."""

    def factor(self, group, state, p):
        deep = self.inner["deep"]
        deep["probability"] = deep.get("probability", 0.0) + 1 / 6
        group.setdefault("own", {})["n"] = torch.tensor(deep["probability"])
        return 2.0 if deep["probability"] % 1 < 0.5 else float(group["own"]["n"])

class FirstNone(Base):
    """Attributes that are None before the first step."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.last, self.more = None, None

    def factor(self, group, state, p):
        self.more = self.more or {"last": 1.0}
        self.last = (self.last or 1) + 1
        self.more["last"] += self.last
        return 1 / self.more["last"]

class DefaultDictionary(Base):
    def factor(self, group, state, p):
        if "counts" not in state:
            state["counts"] = collections.defaultdict(int)
        state["counts"]["a"] += 1
        return 1 / (state["counts"]["a"] + state["counts"]["b"])

class FirstRate(Base):
    def factor(self, group, state, p):
        return group.setdefault("first_rate", group["lr"])

class Drawn(Base):
    def factor(self, group, state, p):
        return torch.rand(()).item()

class Late(Base):
    def factor(self, group, state, p):
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 4:
            state["late"] = torch.zeros_like(p)
        if "late" in state:
            state["late"] += p.grad
            return 1 + state["late"].abs().mean().item()
        return 1.0

class InList(Base):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.counts = [0]

    def factor(self, group, state, p):
        self.counts[0] += 1
        return 1 / self.counts[0]

class TensorOutside(Base):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.momentum = {}

    def factor(self, group, state, p):
        if p not in self.momentum:
            self.momentum[p] = torch.zeros_like(p)
        return self.momentum[p].lerp_(p.grad, 0.1).norm().item()

class OwnGenerator(Base):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay)
        self.generator = torch.Generator().manual_seed(0)

    def factor(self, group, state, p):
        return torch.rand((), generator=self.generator).item()

class ModuleCounter(Base):
    counter = itertools.count()

    def factor(self, group, state, p):
        return 2.0 if next(ModuleCounter.counter) % 4 < 2 else 1.0

class TenthStep(Base):
    """Hidden state that has an effect in every tenth step."""

    def factor(self, group, state, p):
        counts = self.__dict__.setdefault("by_parameter", {})
        counts[p] = counts.get(p, 0) + 1
        return 1.0 if counts[p] % 10 else 5.0

class Text(Base):
    """Text that has an effect."""

    def factor(self, group, state, p):
        state["text"] = str(len(state.get("text", "")) % 3) * (len(state.get("text", "")) + 1)
        return 1 / len(state["text"])

class FailsOnce(Base):
    def factor(self, group, state, p):
        if not state:
            state["buffer"] = torch.zeros(2)
            self.views = {p: state["buffer"]} | getattr(self, "views", {})
        return 1 + self.views[p].add_(1)[0].item()

class Grows(Base):
    def factor(self, group, state, p):
        state["history"] = [*state.get("history", []), p.grad.norm()]
        return sum(state["history"]).item()

class Words(Nested):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["object"] = object()

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
    """Weights and state copied into a fresh optimizer continue as if nothing had happened."""
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


ACCEPTED = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "Rprop": {"weight_decay": 0.0},
    "SGD": {},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_classes_of_torch_resume_bitwise(
    bench: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The trial finds no difference, and leaves the random numbers of the run alone."""
    before = torch.get_rng_state()
    make(bench, f"torch.optim:{name}", bench.weights(), **ACCEPTED[name])
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records


def test_random_numbers_are_the_runs(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint has the states of torch's generators, so that a class may draw from them."""
    make(bench, "own:Drawn", bench.weights())
    assert not caplog.records


@pytest.mark.parametrize(
    "name, why",
    [
        ("InList", "after step 3, the weights differ in step 4"),
        ("TensorOutside", "the weights differ in step 4"),
        ("OwnGenerator", "the weights differ in step 4"),
        ("ModuleCounter", "the weights differ"),
        ("TenthStep", "the weights differ in step 10"),
        ("Text", "changes its structure in step 23"),
        ("Grows", "changes its structure in step 23"),
        ("FailsOnce", "the class failed: AttributeError"),
    ],
)
def test_hidden_state_is_a_warning(
    bench: Any, caplog: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    """The run trains, but the user knows before it starts that it does not resume bitwise."""
    named = bench.weights()
    optimizer = make(bench, f"own:{name}", named)
    (record,) = caplog.records
    assert f"`--optimizer own:{name}` does not resume bitwise" in record.message
    assert why in record.message
    assert "choose another class" in record.message
    bench.advance(named, optimizer, range(3))


def test_one_rank_warns(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks try the class, and one is enough for the warning."""
    create_torch_optimizer(
        parameter_groups(bench.weights().items(), 0.1), "own:InList", warns=False
    )
    assert not caplog.records


def test_late_state_is_a_warning(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints resume once the state is complete; earlier ones do not."""
    make(bench, "own:Late", bench.weights())
    (record,) = caplog.records
    assert "before step 4" in record.message
    assert "`--no-load-optim`" in record.message


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
        ("os.path:join", (), {}, "is not an optimizer", "derived from `torch.optim.Optimizer`"),
        ("os.path:no", (), {}, "has no `no`", "`--optimizer torch.optim:NAdam`"),
        (":join", (), {}, "names no class", "`--optimizer torch.optim:NAdam`"),
        ("os.path:", (), {}, "names no class", "`--optimizer torch.optim:NAdam`"),
        ("torch.optim:Optimizer", (), {}, "is not an optimizer", "`AdamW`"),
        ("torch.optim:LBFGS", (), {}, "needs a closure", "without a closure"),
        ("torch.optim:SparseAdam", (), {"weight_decay": 0.0}, "cannot take a step", "dense"),
        ("torch.optim:Rprop", (), {}, "has no weight decay", "--weight-decay 0"),
        pytest.param(*MUON_CLASS, marks=pytest.mark.skipif(not MUON, reason="this torch lacks it")),
        ("torch.optim:AdamW", ("betas=3,4",), {}, "cannot be created", "--optimizer-args"),
        ("torch.optim:AdamW", ("beta=3",), {}, "no argument `beta`", "did you mean `betas`"),
        ("torch.optim:AdamW", ("eps",), {}, "is not an argument", "key=value"),
        ("torch.optim:AdamW", ("eps=1", "eps=2"), {}, "given twice", ""),
        ("torch.optim:AdamW", ("lr=1",), {}, "the run sets `lr`", ""),
        ("own:Words", (), {}, "of type object", "another class"),
        ("own:Norm", (), {"optimizer_elementwise": True}, "not elementwise", "leave"),
        ("torch.optim:Adafactor", (), {"optimizer_elementwise": True}, "`row_var` of", "leave"),
    ],
)
def test_refused(
    bench: Any, path: str, args: tuple[str, ...], more: dict[str, Any], what: str, remedy: str
) -> None:
    """An optimizer that cannot train is refused at its creation, with the remedy."""
    with pytest.raises(ConfigError) as caught:
        make(bench, path, bench.weights(), *args, **more)
    assert what in caught.value.what
    assert remedy in str(caught.value.hint or "")
