"""Kernels under modules of any torch model: found by what they compute, and taken out exactly."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.base.errors import LmcoreError
from lmcore.library.module_kernels import use_kernels


class PlainRMSNorm(nn.Module):
    """RMS norm with its own names of attributes, as in language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.tiny = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.weight * (x * scale).to(x.dtype)


class ShiftedRMSNorm(PlainRMSNorm):
    """RMS norm whose gain is stored as the difference from 1."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return (1 + self.weight) * (x * scale).to(x.dtype)


class TwoResults(PlainRMSNorm):
    """RMS norm that also returns its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Gated(nn.Module):
    """SwiGLU with the gate as its second projection."""

    def __init__(self, activation: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12, bias=bias), nn.Linear(8, 12, bias=bias)
        self.c, self.act = nn.Linear(12, 8, bias=bias), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)))


class Plain(nn.Module):
    """Feed-forward layer with GELU, and dropout at one of two places."""

    def __init__(self, activation: nn.Module, *, inner_dropout: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 32), nn.Linear(32, 8), activation
        self.drop, self.inner = nn.Dropout(0.5), inner_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.up(x))
        return self.down(self.drop(x)) if self.inner else self.drop(self.down(x))


def rows(report, kept=False):
    """Return the parts of a report with their ops or reasons."""
    found = report.kept if kept else report.replaced
    return {row.part: row.reason if kept else row.op for row in found}


def results(model, x):
    """Return the output and all gradients, with the same dropout each time."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.double().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
OPS = ("rms_norm", "layer_norm", "linear", "bias_gelu", "swiglu")


def make_model(*modules: nn.Module) -> nn.Sequential:
    """Return a model with random parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(*modules)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(
    "module, op",
    [
        (lambda: nn.RMSNorm(8, eps=1e-5), "rms_norm"),
        (lambda: nn.RMSNorm(8), "rms_norm"),
        (lambda: PlainRMSNorm(8), "rms_norm"),
        (lambda: nn.LayerNorm(8), "layer_norm"),
        (lambda: Plain(nn.GELU("tanh")), "bias_gelu"),
        (lambda: Gated(nn.SiLU()), "swiglu"),
        (lambda: Gated(nn.SiLU(), bias=True), "swiglu"),
    ],
)
def test_the_kernel_is_called_and_taken_out(counted_runtime, module, op):
    """Outputs and gradients stay within rounding; after `undo` they are the same bits."""
    model = make_model(module(), module())
    before, names = results(model, X), list(model.state_dict())
    runtime = counted_runtime(*OPS)
    report = use_kernels(model, runtime)
    (found,) = report.replaced
    assert (found.op, found.count, found.kernel, found.plugin) == (op, 2, "own", "chip")
    runtime.calls.clear()
    after = results(model, X)
    assert runtime.calls == {op: 2}
    assert list(model.state_dict()) == names
    for left, right in zip(before, after, strict=True):
        # Sums of a gradient cancel: rounding is relative to its largest terms.
        largest = float(left.abs().max())
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5 * max(largest, 1))
    report.undo()
    report.undo()
    runtime.calls.clear()
    assert all(map(torch.equal, before, results(model, X)))
    assert not runtime.calls
    assert not any("forward" in vars(each) for each in model.modules())


@pytest.mark.parametrize(
    "module, reason",
    [
        (lambda: ShiftedRMSNorm(8), "its results are not the op's"),
        (lambda: TwoResults(8), "it returns another number of results than the op"),
        (lambda: nn.LayerNorm(8, bias=False), "its results are not the op's"),
        (lambda: nn.GroupNorm(2, 8), "its results are not the op's"),
        (lambda: Plain(nn.GELU()), "its activation is not GELU in its tanh form"),
        (lambda: Plain(nn.GELU("tanh"), inner_dropout=True), "its results are not the op's"),
        (lambda: Gated(nn.GELU("tanh")), "its activation is not SiLU"),
    ],
)
def test_a_module_that_only_looks_alike_is_kept(counted_runtime, module, reason):
    """It is compared on random numbers, dropout included, and the reason reported."""
    model = make_model(module())
    report = use_kernels(model, counted_runtime(*OPS))
    assert not report.replaced
    assert reason in rows(report, kept=True)[type(model[0]).__name__]
    assert reason in str(report)


def test_linear_is_replaced_on_request(counted_runtime):
    """By default it stays, since the host decides which product is faster."""
    model, runtime = make_model(nn.Linear(8, 4), nn.Linear(4, 8, bias=False)), counted_runtime(*OPS)
    before = results(model, X)
    report = use_kernels(model, runtime)
    assert "measure it with `linear=True`" in rows(report, kept=True)["Linear"]
    report.undo()
    report = use_kernels(model, runtime, linear=True)
    assert rows(report) == {"Linear 8 -> 4": "linear", "Linear 4 -> 8": "linear"}
    runtime.calls.clear()
    assert all(map(torch.equal, before, results(model, X)))
    assert runtime.calls == {"linear": 2}


def test_a_kernel_that_is_torchs_own_function_replaces_nothing(counted_runtime):
    """`nn.LayerNorm` calls it already."""
    from lmcore.contract import OpImpl

    runtime = counted_runtime()
    target = "lmcore.contract.op.torch_kernels:layer_norm"
    runtime.ops.register([OpImpl("layer_norm", "torch", target, plugin="chip")])
    model = make_model(nn.LayerNorm(8))
    (kept,) = use_kernels(model, runtime).kept
    assert kept.reason == "kernel `torch` is the function of torch that the module calls"


def test_without_a_kernel_nothing_is_replaced(counted_runtime):
    """The reference is no faster; but the user may prefer it."""
    model = make_model(PlainRMSNorm(8))
    (kept,) = use_kernels(model, counted_runtime()).kept
    assert kept.reason == "the device has no kernel for `rms_norm` (none is offered)"
    preferred = counted_runtime(preferences={"rms_norm": ("reference",)})
    assert use_kernels(model, preferred).replaced[0].kernel == "reference"


def test_another_dtype_or_device_runs_the_modules_own_forward(counted_runtime):
    """A model that moved still computes; mixed dtypes give what they gave."""
    runtime = counted_runtime("rms_norm", "swiglu")
    model = make_model(PlainRMSNorm(8), Gated(nn.SiLU()))
    use_kernels(model, runtime)
    runtime.calls.clear()
    half = X.bfloat16()
    assert model[0](half).dtype == torch.float32  # the weight's dtype, as before
    assert not runtime.calls
    assert model.bfloat16()(half).dtype == torch.bfloat16
    assert runtime.calls == {"rms_norm": 1, "swiglu": 1}
    assert model.to("meta")(half.to("meta")).is_meta
    assert runtime.calls == {"rms_norm": 1, "swiglu": 1}


def test_swiglu_under_autocast(counted_runtime):
    """The dtype and the values are autocast's."""
    runtime = counted_runtime("swiglu")
    model = make_model(Gated(nn.SiLU()))
    with torch.autocast("cpu", torch.bfloat16):
        before = model(X)
        use_kernels(model, runtime)
        runtime.calls.clear()
        after = model(X)
    assert runtime.calls == {"swiglu": 1}
    assert before.dtype == after.dtype == torch.bfloat16
    torch.testing.assert_close(before, after, rtol=2e-2, atol=2e-2)


def test_a_copy_of_the_model_has_its_own_weights(counted_runtime):
    """`copy.deepcopy` of a model with kernels does not compute with the first one's weights."""
    model = make_model(PlainRMSNorm(8), Plain(nn.GELU("tanh")))
    use_kernels(model, counted_runtime(*OPS))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(X).any()
    assert model(X).any()


def test_hooks_of_projections_run(counted_runtime):
    """A projection with a hook is called as a module, so the layer's own forward runs."""
    runtime = counted_runtime("bias_gelu")
    model = make_model(Plain(nn.GELU("tanh")))
    use_kernels(model, runtime)
    seen = []
    model[0].up.register_forward_hook(lambda *_: seen.append(1))
    runtime.calls.clear()
    model(X)
    assert (seen, dict(runtime.calls)) == ([1], {})


def test_state_is_left_alone(counted_runtime):
    """Random numbers, training mode and gradients are as before the call."""
    model = make_model(Plain(nn.GELU("tanh")), nn.LayerNorm(8)).train()
    state = torch.get_rng_state()
    use_kernels(model, counted_runtime(*OPS))
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_second_call_is_refused(counted_runtime):
    """The kernels are in the model already."""
    model = make_model(PlainRMSNorm(8))
    report = use_kernels(model, counted_runtime("rms_norm"))
    with pytest.raises(LmcoreError, match="in this model already"):
        use_kernels(model, counted_runtime("rms_norm"))
    report.undo()
    assert use_kernels(model, counted_runtime("rms_norm")).replaced


def test_a_forward_of_other_code_stays(counted_runtime):
    """A module whose forward pass was replaced before is kept; one replaced since stops `undo`."""
    model = make_model(PlainRMSNorm(8), PlainRMSNorm(8))
    model[0].forward = functional.relu
    report = use_kernels(model, counted_runtime("rms_norm"))
    assert (report.replaced[0].count, report.kept[0].count) == (1, 1)
    assert report.kept[0].reason == "its forward pass is replaced by other code"
    ours = model[1].forward
    model[1].forward = functional.relu
    with pytest.raises(LmcoreError, match="`forward` of a `PlainRMSNorm` was changed since"):
        report.undo()
    model[1].forward = ours
    report.undo()
    assert "forward" not in vars(model[1])
    assert model[0].forward is functional.relu


def test_the_report_is_a_table(counted_runtime):
    """One row for each kind of module, kernel and plugin or reason."""
    model = make_model(PlainRMSNorm(8), ShiftedRMSNorm(8))
    report = use_kernels(model, counted_runtime("rms_norm"))
    head, first, second = str(report).splitlines()
    assert head.split() == ["part", "count", "op", "kernel", "plugin", "or", "reason"]
    assert first.split() == ["PlainRMSNorm", "1", "rms_norm", "own", "chip"]
    assert second.startswith("ShiftedRMSNorm      1")
    assert repr(report) == "<KernelReport: 1 replaced, 1 not>"


def test_weights_on_the_meta_device_are_kept(counted_runtime):
    """There are no numbers to compare."""
    with torch.device("meta"):
        model = nn.Sequential(nn.RMSNorm(8), Gated(nn.SiLU()))
    report = use_kernels(model, counted_runtime(*OPS))
    assert not report.replaced
    assert "meta device" in rows(report, kept=True)["Gated"]


def test_sharded_weights_are_kept(counted_runtime):
    """A layer with a sharded weight cannot be compared; the reason names the order of calls."""
    model = make_model(Gated(nn.SiLU()), Plain(nn.GELU("tanh")), PlainRMSNorm(8))
    for weight in (model[0].a.weight, model[1].up.weight, model[2].weight):
        weight.placements = ()  # as a `DTensor` has
    report = use_kernels(model, counted_runtime(*OPS))
    assert not report.replaced
    reasons = rows(report, kept=True)
    for part in ("Gated", "Plain", "PlainRMSNorm"):
        assert "before the model is sharded" in reasons[part]


def test_a_model_on_another_device_is_refused(counted_runtime):
    """Nothing could be compared; the error says how to move it."""
    runtime = counted_runtime("rms_norm")
    runtime.device.type = "chip"
    with pytest.raises(LmcoreError, match="the model is on cpu, and the device of the session is"):
        use_kernels(make_model(PlainRMSNorm(8)), runtime)


def test_the_state_dict_can_be_pickled(counted_runtime):
    """It holds tensors and no kernel."""
    model = make_model(PlainRMSNorm(8))
    use_kernels(model, counted_runtime("rms_norm"))
    assert list(pickle.loads(pickle.dumps(model.state_dict()))) == ["0.weight"]
    with pytest.raises(LmcoreError, match="a model with kernels cannot be pickled"):
        pickle.dumps(model)


def test_a_session_puts_kernels_under_a_model(start):
    """`rt.use_kernels` is the function with the session's runtime."""
    model = make_model(PlainRMSNorm(8), nn.Linear(8, 4))
    before = results(model, X)
    report = start().use_kernels(model, linear=True)
    assert {row.op for row in report.replaced} <= {"rms_norm", "linear"}
    for left, right in zip(before, results(model, X), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    report.undo()
    assert all(map(torch.equal, before, results(model, X)))
