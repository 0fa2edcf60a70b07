"""A session of one process: arguments, placement, steps, exchanges, and the end."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lmcore
from lmcore.errors import ConfigError, DeviceError
from lmcore.plugin import hook_calls

Batch = tuple[torch.Tensor, torch.Tensor]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model with dropout, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 8) -> list[Batch]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def plain_losses(accumulated: int = 1) -> list[float]:
    """Return the losses of a loop in plain torch."""
    model, optimizer = make()
    losses = []
    for number, (x, y) in enumerate(batches(), start=1):
        loss = functional.cross_entropy(model(x), y)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_are_those_of_plain_torch(start: Any, accumulated: int) -> None:
    """Bit for bit, with dropout, clipping and gradient accumulation."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    losses, updated = [], []
    for x, y in batches():
        with rt.accumulate(accumulated):
            with rt.autocast():
                loss = functional.cross_entropy(model(x), y)
            rt.backward(loss)
            rt.step(optimizer, clip=0.3)
        losses.append(loss.item())
        updated.append(rt.updated)
    assert losses == plain_losses(accumulated)
    assert rt.updates == sum(updated) == len(updated) // accumulated
    assert all(parameter.grad is None for parameter in model.parameters())


def test_data_that_end_within_an_accumulation_count_in_full(start: Any) -> None:
    """The gradient of an incomplete update is the mean over its micro-batches."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    model.eval()
    (x, y), *_ = batches()
    rt.backward(functional.cross_entropy(model(x), y))
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(parameter.grad.clone() for parameter in model.parameters())
    )
    with rt.accumulate(4, last=True):
        rt.backward(functional.cross_entropy(model(x), y))
        rt.step(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(seen, whole, strict=True))


def test_an_accumulation_ends_with_the_epoch_of_its_own_loader(start: Any) -> None:
    """Not with an evaluation's, whether it ends, is left, or its iterator is kept."""
    rt = start()
    train, test = rt.loader(batches(6), batches(1))
    model, optimizer = rt.prepare(*make())

    def updates(between: Any) -> list[bool]:
        made = []
        for number, (x, y) in enumerate(train):
            if number == 1:
                between()
            with rt.accumulate(4):
                rt.backward(functional.cross_entropy(model(x), y))
                rt.step(optimizer)
            made.append(rt.updated)
        return made

    def leave() -> None:
        for _ in test:
            break

    kept = iter(test)
    next(kept)
    with rt.accumulate(1):
        pass
    wanted = [False, False, False, True, False, True]
    for between in (lambda: None, lambda: list(test), leave, lambda: next(iter(test))):
        assert updates(between) == wanted


@pytest.mark.parametrize(
    "last, wanted", [(None, [True] * 2), (True, [True] * 2), (False, [False, True])]
)
def test_parts_of_a_last_batch(start: Any, last: Any, wanted: list[bool]) -> None:
    """`last` decides if they make one update."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    made = []
    for x, y in rt.loader(batches(1)):
        for part, its in zip(x.chunk(2), y.chunk(2), strict=True):
            with rt.accumulate(2, last=last):
                rt.backward(functional.cross_entropy(model(part), its))
                rt.step(optimizer)
            made.append(rt.updated)
    assert made == wanted


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


def test_a_norm_is_returned_if_gradients_are_clipped(start: Any) -> None:
    """It is the norm before clipping."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    x = batches()[0][0]
    rt.backward(model(x).square().sum() * 100)
    expected = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert torch.equal(rt.step(optimizer, clip=1.0), expected)
    rt.backward(model(x).sum())
    assert rt.step(optimizer) is None


def test_exchanges_with_one_process(start: Any) -> None:
    """Values come back as they are, as new tensors."""
    rt = start()
    x = torch.arange(3.0)
    assert torch.equal(rt.all_reduce(x), x)
    assert rt.all_reduce({"loss": 2.0, "counts": [1, x]}, "sum")["loss"] == 2.0
    assert rt.all_gather(x).shape == (1, 3)
    assert rt.all_gather({"a": 1}) == [{"a": 1}]
    assert rt.broadcast("text") == "text"
    rt.barrier()
    assert (rt.rank, rt.world_size, rt.is_main, rt.device.type) == (0, 1, True, "cpu")
    assert rt.describe()["device"]["type"] == "cpu"
    assert rt.memory()["allocated"] > 0
    with rt.range("name"), rt.rng.preserved():
        pass


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


def test_float16_skips_an_update_that_overflows(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss scale falls, the weights stay, and the next update is made; one line says so."""
    try:
        rt = start(precision="fp16", initial_loss_scale=2.0**20)
    except ConfigError as error:
        pytest.skip(str(error))
    model, optimizer = rt.prepare(*make())
    (x, y), *_ = batches()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scales = []
    for factor in (1e30, 1e30, 1.0):
        with rt.autocast():
            loss = functional.cross_entropy(model(x), y)
        rt.backward(loss * factor)
        rt.step(optimizer, clip=1.0)
        scales.append(rt._updates.loss_scale.value)
        if factor > 1:
            assert not rt.updated
            assert all(map(torch.equal, before, model.parameters()))
    assert scales[-1] < 2.0**20
    assert capsys.readouterr().err.count("update 1 is skipped, as its gradients overflow") == 1
    assert rt.updates == int(rt.updated)


def test_the_loss_scale_of_several_optimizers(start: Any) -> None:
    """It is that of the backward pass, also after the first one's gradients have overflowed."""
    try:
        rt = start(precision="fp16", initial_loss_scale=2.0**10, hysteresis=1)
    except ConfigError as error:
        pytest.skip(str(error))
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    rt.prepare(*models, *optimizers)
    overflowing, other = (model.weight for model in models)
    overflowing.register_hook(lambda grad: grad * math.inf)
    nn.init.zeros_(other)
    with rt.accumulate(2):
        rt.backward(other.sum() / 2)
    rt.backward(overflowing.sum())
    rt.step(optimizers[0])
    assert (rt.updated, rt._updates.loss_scale.value) == (False, 2.0**9)
    with rt.accumulate(2):
        rt.backward(other.sum() * 3.5)
        rt.step(optimizers[1])
    assert other.tolist() == [[-1.0] * 3]
    rt.backward(overflowing.sum() + other.sum())
    for optimizer in optimizers:
        rt.step(optimizer)
    assert other.tolist() == [[-1.5] * 3]


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


@pytest.mark.parametrize("precision, count", [("bf16", 1), ("fp32", 0)])
def test_a_forward_pass_without_autocast(
    start: Any, capsys: pytest.CaptureFixture[str], precision: str, count: int
) -> None:
    """It is a warning, once, unless a context was entered since the last step, or is open."""
    rt = start(precision=precision)
    model, optimizer = rt.prepare(*make())
    x = torch.ones(2, 6)

    def step() -> None:
        rt.backward(model(x).mean())
        rt.step(optimizer)

    with rt.autocast():
        step()
        step()
        loss, other = model(x).mean(), model(x).square().mean()
    rt.backward(loss, retain_graph=True)
    rt.backward(other)
    rt.step(optimizer)
    assert not capsys.readouterr().err
    step()
    step()
    shown = capsys.readouterr().err
    assert shown.count("no forward pass was in `rt.autocast()`") == count
    assert ("computed in float32, not in bf16" in shown) == bool(count)
    assert ("test_session.py, line" in shown) == bool(count)


class _Unsaved:
    pass


def test_a_frozen_optimizer_does_nothing(start: Any) -> None:
    """Its step is no update, and the step after it is unfrozen is one."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    head = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for group in head.param_groups:
        for parameter in group["params"]:
            parameter.requires_grad_(requires_grad=False)
    with_a_gradient(rt, model).step(head)
    assert (rt.updated, rt.updates) == (False, 0)
    rt.step(optimizer)
    assert (rt.updated, rt.updates) == (True, 1)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_optimizers_own_step(start: Any, precision: str) -> None:
    """It counts as an update; with a loss scale or before the last micro-batch it is an error."""
    try:
        rt = start(precision=precision)
    except ConfigError as error:
        pytest.skip(str(error))
    model, optimizer = rt.prepare(*make())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with_a_gradient(rt, model)
    if precision == "fp16":
        with pytest.raises(ConfigError, match=r"`AdamW.step\(\)` .* multiplied by the loss scale"):
            optimizer.step()
    else:
        optimizer.step()
        assert (rt.updated, rt.updates) == (True, 1)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert rt.updates == 1  # torch's optimizers may step again without new gradients
        with rt.accumulate(2):
            with_a_gradient(rt, model)
            with pytest.raises(ConfigError, match="before the gradients of an update are compl"):
                optimizer.step()
        return
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_numbers_that_are_not_finite(start: Any, clip: float | None) -> None:
    """On the CPU they are an error before the weights are lost."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.ones(2, 6)).mean()
    with pytest.raises(lmcore.RunError, match="the loss is nan"):
        rt.backward(loss * math.nan)
    model[0].weight.register_hook(lambda grad: grad * math.inf)
    rt.backward(loss)
    if clip is not None:
        with pytest.raises(lmcore.RunError, match=r"gradient norm of update 1 is (inf|nan)"):
            rt.step(optimizer, clip=clip)
        assert all(map(torch.equal, before, model.parameters()))


def test_tensors_on_two_devices(start: Any) -> None:
    """Torch's error gets a hint, if it ends the session."""
    message = "Expected all tensors to be on the same device, but found two"
    with pytest.raises(RuntimeError) as error, start():
        raise RuntimeError(message)
    assert "take batches of `rt.loader(loader)`" in error.value.__notes__[0]


def with_a_gradient(rt: Any, model: nn.Module) -> Any:
    """Return the session after a backward pass of a model."""
    rt.backward(model(torch.ones(2, 6)).mean())
    return rt


def two_steps(rt: Any, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Wrap a loop in one `accumulate`."""
    with rt.accumulate(4):
        rt.step(optimizer)
        rt.step(optimizer)


def own_backward(rt: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute the gradients of an accumulation by torch's own `backward`."""
    with rt.accumulate(2, last=True):
        model(torch.ones(2, 6)).mean().backward()
        rt.step(optimizer)


def step_outside(rt: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step after the block of a micro-batch that is not the last one."""
    with rt.accumulate(2):
        with_a_gradient(rt, model)
    rt.step(optimizer)


def step_without_last(rt: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step in the last micro-batch of an update, whose backward pass was left out."""
    with rt.accumulate(2):
        with_a_gradient(rt, model)
    with rt.accumulate(2):
        rt.step(optimizer)


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
        (lambda rt, model, optimizer: rt.backward(model(torch.ones(2, 6))), "take its mean"),
        (lambda rt, model, optimizer: rt.backward(torch.ones(())), "no trained parameter"),
        *[
            (lambda rt, model, optimizer, clip=clip: rt.step(optimizer, clip=clip), "clip=")
            for clip in (0, -1, math.nan, "1", True)
        ],
        (lambda rt, model, optimizer: rt.step(optimizer), "no parameter of AdamW has a gradient"),
        (lambda rt, model, optimizer: rt.step(model), "`step` of Sequential"),
        (
            lambda rt, model, optimizer: rt.backward(
                torch.ones((), device="meta", requires_grad=True)
            ),
            "`backward` of a loss on meta",
        ),
        (two_steps, "one for each micro-batch"),
        (own_backward, "not computed by `rt.backward`"),
        (step_outside, "`step` before the gradients of an update are complete"),
        (step_without_last, "was not in the last micro-batch of `rt.accumulate`"),
        (
            lambda rt, model, optimizer: with_a_gradient(rt, model).step(
                torch.optim.SGD(copy.deepcopy(model).parameters())
            ),
            "no parameter of SGD has a gradient",
        ),
        (lambda rt, model, optimizer: rt.accumulate(0).__enter__(), "accumulate(0)"),
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


def test_weights_of_another_dtype_are_refused(start: Any) -> None:
    """Under float32 a model in bfloat16 would not compute as promised."""
    with pytest.raises(DeviceError, match="bfloat16, not float32"):
        start().prepare(nn.Linear(2, 2).bfloat16())


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
