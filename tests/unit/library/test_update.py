"""Backward passes and steps in a session of one process: accumulation, loss scale, checks."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from user_loop import batches, make

import lmcore
from lmcore import contract
from lmcore.base.errors import ConfigError, RunError
from lmcore.library.losses import FiniteCheck


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


@pytest.mark.parametrize("own", [False, True])
def test_data_that_end_within_an_accumulation_count_in_full(start: Any, own: bool) -> None:
    """The gradient of an incomplete update is the mean over its micro-batches, by either `step`."""
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
        if own:
            optimizer.step()
        else:
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
    """It is the backward pass's scale, also after the first one's gradients have overflowed."""
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
    assert ("test_update.py, line" in shown) == bool(count)


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


def test_an_optimizer_of_an_earlier_session(start: Any) -> None:
    """The end of a session within an update does not concern the next one."""
    model, optimizer = make()
    with start() as rt, rt.accumulate(2):
        rt.prepare(model, optimizer)
        with_a_gradient(rt, model)
    rt = start()
    rt.prepare(model, optimizer)
    with_a_gradient(rt, model).step(optimizer)
    assert rt.updates == 1


class Device(SimpleNamespace):
    """A device other than the CPU, with or without asynchronous copies."""

    step_boundary = staticmethod(contract.Device.step_boundary)

    def require(self, name: str) -> Any:
        return getattr(self, name)


def test_norms_of_an_asynchronous_device() -> None:
    """They are checked when their copy has arrived, unless a checkpoint is loaded before."""
    arrived = [False]
    event = SimpleNamespace(record=lambda: None, synchronize=list, query=lambda: arrived[0])
    device = Device(type="chip", pin_memory=torch.clone, new_event=lambda: event)
    check, nan = FiniteCheck(device), torch.tensor(math.nan)
    check.check_loss(nan)
    check.check_norm(nan, 1)
    check.check_norm(torch.tensor(1.0), 2)
    check.drop_copied()
    check.check_copied()
    check.check_norm(nan, 3)
    arrived[0] = True
    with pytest.raises(lmcore.RunError, match="gradient norm of update 3 is nan") as error:
        check.check_norm(torch.tensor(1.0), 4)
    assert "the weights are lost since that update or one shortly before it" in str(error.value)
    check.check_norm(nan, 5)
    with pytest.raises(lmcore.RunError, match="gradient norm of update 5 is nan"):
        check.check_copied()
    check.check_copied()


def test_norms_of_a_lazy_device() -> None:
    """They are checked an update later, when the boundary after theirs has run them."""
    check = FiniteCheck(Device(type="chip", step_boundary=list))  # type: ignore[arg-type]
    check.check_norm(torch.tensor(math.nan), 1)
    with pytest.raises(lmcore.RunError, match="gradient norm of update 1 is nan"):
        check.check_norm(torch.tensor(1.0), 2)


def test_norms_of_a_device_without_asynchronous_copies() -> None:
    """They are checked at once."""
    check = FiniteCheck(Device(type="chip", pin_memory=None, new_event=None))
    check.check_norm(torch.tensor(1.0), 1)
    with pytest.raises(lmcore.RunError, match="the weights are not updated"):
        check.check_norm(torch.tensor(math.inf), 2)


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
        (lambda rt, model, optimizer: rt.backward(model(torch.ones(2, 6))), "take its mean"),
        (lambda rt, model, optimizer: rt.backward(torch.ones(())), "no trained parameter"),
        (lambda rt, model, optimizer: rt.backward({"loss": torch.ones(())}), '`output["loss"]`'),
        (
            lambda rt, model, optimizer: rt.backward(SimpleNamespace(loss=torch.ones(()))),
            "`output.loss`",
        ),
        (lambda rt, model, optimizer: rt.backward(0.5), "without `.item()`"),
        (lambda rt, model, optimizer: rt.backward(None), "that the loss function returned"),
        (
            lambda rt, model, optimizer: with_a_gradient(rt, model).step(
                torch.optim.LBFGS(model.parameters())
            ),
            "`optimizer.step(closure)`",
        ),
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
    ],
)
def test_wrong_steps(start: Any, wrong: Any, message: str) -> None:
    """Each is an error that says what is wrong."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    with pytest.raises(ConfigError) as error:
        wrong(rt, model, optimizer)
    assert message in error.value.render()


def test_complex_gradients_are_clipped(start: Any) -> None:
    """They are clipped as by torch, also if a gradient is a conjugate view."""
    rt = start()
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2, 2), 1 + 2j))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rt.prepare(model, optimizer)
    rt.backward((model.weight.conj() * (3 + 4j)).abs().sum())
    assert model.weight.grad.is_conj()
    expected = model.weight.grad.resolve_conj().clone()
    norm = rt.step(optimizer, clip=1.0)
    assert norm.item() == pytest.approx(expected.norm().item())
    torch.testing.assert_close(
        model.weight.detach(), torch.full((2, 2), 1 + 2j) - expected / (norm + 1e-6)
    )


def masked(*valid: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches of 4 samples; so many have a class, the others none."""
    found = []
    for (x, y), number in zip(batches(len(valid)), valid, strict=True):
        found.append((x, torch.where(torch.arange(4) < number, y, -100)))
    return found


def weighted_gradients(rt: Any, parts: Any, *, accumulated: int, weigh: Any) -> list[torch.Tensor]:
    """Return the gradients with which `rt.step` updates, of all its updates."""
    model, optimizer = rt.prepare(*make())
    model.eval()
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(parameter.grad.clone() for parameter in model.parameters())
    )
    for number, (x, y) in enumerate(parts, start=1):
        with rt.accumulate(accumulated, last=number == len(parts)):
            with rt.autocast():
                loss = functional.cross_entropy(model(x), y)
            rt.backward(loss, weight=weigh(y))
            rt.step(optimizer)
    return seen


WEIGHTS = {
    "number": lambda y: int((y != -100).sum()),
    "tensor": lambda y: (y != -100).sum(),
    "float": lambda y: (y != -100).float().sum() * 0.5,
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("valid", [(4, 1, 0, 3), (0, 2, 4), (1,)])
def test_weights_of_losses(start: Any, kind: str, valid: Any, precision: str) -> None:
    """The gradients are of the mean over all targets of an update, also if its data ended early.

    The mean of a micro-batch without a target is NaN, and counts nothing.
    """
    parts = masked(*valid)
    model, _ = make()
    model.eval()
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    functional.cross_entropy(model(x), y).backward()
    options = {"initial_loss_scale": 1024.0} if precision == "fp16" else {}
    rt = start(precision=precision, **options)
    found = weighted_gradients(rt, parts, accumulated=4, weigh=WEIGHTS[kind])
    wide = 1e-6 if precision == "fp32" else 2e-2
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=wide, atol=wide * 0.1)


def test_equal_weights_change_nothing(start: Any) -> None:
    """Gradients equal the gradients of losses without weights, bit for bit."""
    rt = start()
    found = [
        weighted_gradients(rt, batches(4), accumulated=2, weigh=weigh)
        for weigh in (lambda _: None, lambda _: 37)
    ]
    assert len(found[0]) == 8
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("weight", [-1, True, "4", math.inf, torch.ones(2)])
def test_wrong_weights(start: Any, weight: Any) -> None:
    """A negative number, an infinite one and other types are refused."""
    rt = start()
    model, _ = rt.prepare(*make())
    (x, y), *_ = batches()
    with pytest.raises(ConfigError, match=r"`backward\(weight=.*expected a number of 0 or more"):
        rt.backward(functional.cross_entropy(model(x), y), weight=weight)


def test_weights_of_some_losses(start: Any) -> None:
    """Losses of one update all have weights, or none has, and a micro-batch has one such loss."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    (x, y), *_ = batches()

    def backward(weight: float | None) -> None:
        rt.backward(functional.cross_entropy(model(x), y), weight=weight)

    with rt.accumulate(2):
        backward(4)
    with (
        pytest.raises(ConfigError, match="in some micro-batches of an update only"),
        rt.accumulate(2),
    ):
        backward(None)
    optimizer.zero_grad()
    for first, second in ((4, 4), (4, None), (None, 4)):
        with rt.accumulate(1):
            backward(first)
            with pytest.raises(ConfigError, match="a second `backward` in one micro-batch"):
                backward(second)
        optimizer.zero_grad()
    backward(None)
    optimizer.step()
    backward(4)
    with pytest.raises(ConfigError, match=r"`AdamW.step\(\)` with gradients of losses that have w"):
        optimizer.step()
    rt.step(optimizer)
    backward(None)
    rt.step(optimizer)
    assert rt.updates == 3


def test_no_weight_at_all(start: Any) -> None:
    """An update without any target is an error, and leaves the weights as they are."""
    rt = start()
    model, optimizer = rt.prepare(*make())
    before = copy.deepcopy(model.state_dict())
    (x, y), *_ = masked(0)
    rt.backward(functional.cross_entropy(model(x), y), weight=0)
    with pytest.raises(RunError, match="the weights of all losses of update 1 together are 0"):
        rt.step(optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_weight_at_all_with_a_loss_scale(start: Any) -> None:
    """On an asynchronous device, too, it is an error at once: the scale waits for the device."""
    rt = start(precision="fp16", initial_loss_scale=2.0**10)
    model, optimizer = rt.prepare(*make())
    before = copy.deepcopy(model.state_dict())
    event = SimpleNamespace(record=lambda: None, synchronize=list, query=lambda: False)
    device = Device(type="chip", pin_memory=torch.clone, new_event=lambda: event)
    rt._updates.finite = FiniteCheck(device)
    with rt.autocast():
        loss = model(torch.ones(2, 6)).mean()
    rt.backward(loss, weight=0)
    with pytest.raises(RunError, match="of update 1 together are 0") as error:
        rt.step(optimizer)
    assert "the weights are not updated" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
