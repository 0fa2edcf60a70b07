"""The device's `adamw` in torch's Adam and AdamW."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lmcore.base.errors import LmcoreError
from lmcore.library.module_kernels import use_kernels


def model_and(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options):
    """Return a model with two groups of parameters in its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "lr": 0.03},
    ]
    return model, kind(groups, **{"lr": 0.01, **options})


def train(model, optimizer, steps: int = 4, scheduler=None) -> list[torch.Tensor]:
    """Return copies of the weights after some steps."""
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-3, "foreach": True}),
        (torch.optim.Adam, {}),
    ],
)
def test_weights_equal_torchs(counted_runtime, kind, options):
    """The kernel updates each group with its own options; state and `undo` are torch's."""
    expected = train(*model_and(kind, **options), steps=6)
    model, optimizer = model_and(kind, **options)
    runtime = counted_runtime("adamw")
    train(model, optimizer, steps=2)
    report = use_kernels(model, runtime, optimizer)
    train(model, optimizer, steps=2)
    assert runtime.calls == {"adamw": 4}
    (row,) = [row for row in report.replaced if row.op == "adamw"]
    assert (row.part, row.count) == (kind.__name__, 3)
    assert [int(state["step"]) for state in optimizer.state.values()] == [4, 4, 4]
    report.undo()
    found = train(model, optimizer, steps=2)
    assert runtime.calls == {"adamw": 4}
    assert "_init_group" not in vars(optimizer)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_a_graph_of_earlier_weights_is_refused(counted_runtime):
    """Autograd sees that the kernel has changed them, as with torch's own update."""
    model, optimizer = model_and()
    use_kernels(model, counted_runtime("adamw"), optimizer)
    loss = model(torch.ones(3, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_undo_gives_the_same_bits(counted_runtime):
    """Before any step with the kernel, it leaves nothing behind."""
    expected = train(*model_and())
    model, optimizer = model_and()
    use_kernels(model, counted_runtime("adamw"), optimizer).undo()
    assert all(map(torch.equal, train(model, optimizer), expected))


@pytest.mark.parametrize("first", ["scheduler", "kernels"])
def test_schedulers_hooks_and_closures(counted_runtime, first):
    """`step` is torch's own: a scheduler before or after, hooks, and a closure's loss."""

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer = model_and()
    expected = train(model, optimizer, scheduler=scheduler_of(optimizer))
    model, optimizer = model_and()
    runtime, calls = counted_runtime("adamw"), []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = scheduler_of(optimizer) if first == "scheduler" else None
    use_kernels(model, runtime, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, optimizer, scheduler=scheduler or scheduler_of(optimizer))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)
    assert calls == ["post"] * 4
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        (torch.optim.SGD, {}, "only the optimizers `Adam` and `AdamW`"),
        (torch.optim.AdamW, {"amsgrad": True}, "`amsgrad=True`"),
        (torch.optim.AdamW, {"fused": True}, "`fused=True`"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight decay is added to the gradient"),
    ],
)
def test_other_updates_are_kept(counted_runtime, kind, options, reason):
    """The report says why, and nothing is changed."""
    model, optimizer = model_and(kind, **options)
    before = vars(optimizer).copy()
    report = use_kernels(model, counted_runtime("adamw"), optimizer)
    assert reason in {row.part: row.reason for row in report.kept}[kind.__name__]
    assert vars(optimizer) == before


def test_a_group_of_another_case_is_torchs(counted_runtime):
    """One group is not the op, and one is no more after a while: the report counts the calls."""
    expected_model, expected = model_and()
    expected.param_groups[1]["maximize"] = True
    model, optimizer = model_and()
    optimizer.param_groups[1]["maximize"] = True
    runtime = counted_runtime("adamw")
    report = use_kernels(model, runtime, optimizer)
    for left, right in zip(train(model, optimizer), train(expected_model, expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)
    assert runtime.calls == {"adamw": 4}
    assert report.own_calls == {"AdamW: `maximize=True`": 4}
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    train(model, optimizer, steps=1)
    assert runtime.calls == {"adamw": 4}


def test_parameters_that_the_kernel_is_not_for(counted_runtime):
    """Weights of another dtype, with the device's reference alone for it, are torch's."""
    model, optimizer = model_and()
    extra = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer.add_param_group({"params": [extra]})
    runtime = counted_runtime("adamw")
    use_kernels(model, runtime, optimizer)
    extra.grad = torch.ones(3, dtype=torch.complex64)
    optimizer.step()
    assert runtime.calls == {}  # no other gradients
    assert not torch.equal(extra.detach(), torch.ones(3, dtype=torch.complex64))


def test_state_dicts_and_copies(counted_runtime):
    """States load into an optimizer with kernels; a copy runs torch's own update."""
    model, optimizer = model_and()
    runtime = counted_runtime("adamw")
    use_kernels(model, runtime, optimizer)
    train(model, optimizer, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved.keys() == model_and()[1].state_dict().keys()
    optimizer.load_state_dict(saved)
    train(model, optimizer, steps=1)
    assert runtime.calls == {"adamw": 4}
    assert "_init_group" not in vars(copy.deepcopy(optimizer))


def test_refused(counted_runtime):
    """An optimizer twice, and something that is none."""
    model, optimizer = model_and()
    runtime = counted_runtime("adamw")
    use_kernels(model, runtime, optimizer)
    with pytest.raises(LmcoreError, match="in this optimizer already"):
        use_kernels(model, runtime, optimizer)
    with pytest.raises(LmcoreError, match="`bool` is no `Optimizer`"):
        use_kernels(model, runtime, False)
