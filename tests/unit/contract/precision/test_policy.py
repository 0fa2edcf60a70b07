"""Precision policies: what they promise, and the proof that it holds in forward and backward."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lmcore.base.errors import DeviceError, PluginError
from lmcore.contract import (
    Device,
    PrecisionPolicy,
    autocast_policy,
    double_precision_policy,
    full_precision_policy,
)
from lmcore.contract.precision.check import wide_attention
from lmcore.contract.precision.products import ProductCounter


def autocast(device: Device) -> PrecisionPolicy:
    """Return the policy bf16 by autocast."""
    return autocast_policy(device, name="bf16", compute="bfloat16")


def test_standard_policies_hold(device: Device) -> None:
    """The core's policies hold on the host, and leave autocast and the default dtype alone."""
    for policy in (full_precision_policy(), autocast(device), double_precision_policy()):
        policy.verify(device)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32


def test_autocast_computes_low_and_keeps_high(device: Device) -> None:
    """Products are bfloat16 inside the context, parameters stay float32."""
    policy = autocast(device)
    layer = nn.Linear(4, 4)
    with policy.context():
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert (policy.compute, policy.keep, policy.reduce) == ("bfloat16", "float32", "float32")


def test_words(device: Device) -> None:
    """A policy says in words and as JSON what it computes, keeps and reduces in."""
    fp16 = autocast_policy(device, name="fp16", compute="float16", loss_scaling=True)
    fp8 = replace(autocast(device), name="fp8", compute="float8_e4m3fn", output="bfloat16")
    assert [policy.words for policy in (full_precision_policy(), fp16, fp8)] == [
        "fp32: everything in float32",
        (
            "fp16: products in float16 (autocast), weights in float32, gradients summed in "
            "float32, dynamic loss scale"
        ),
        (
            "fp8: products in float8_e4m3fn to bfloat16 (autocast), weights in float32, "
            "gradients summed in float32"
        ),
    ]
    said = json.loads(json.dumps(fp8.describe()))
    assert said == {
        "name": "fp8",
        "compute": "float8_e4m3fn",
        "output": "bfloat16",
        "keep": "float32",
        "reduce": "float32",
        "loss_scaling": False,
        "prepares_model": False,
        "words": fp8.words,
        "plugin": "",
    }
    assert double_precision_policy().describe()["prepares_model"]


def test_autocast_that_is_silently_off_is_an_error(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context that does nothing does not pass for half precision."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    with pytest.raises(DeviceError, match="`bf16` is not applied") as caught:
        autocast(device).verify(device)
    assert caught.value.why == "products under it are float32, not bfloat16"
    assert "--precision fp32" in str(caught.value.hint)


@pytest.mark.filterwarnings("ignore:.*autocast:UserWarning")
def test_autocast_of_an_absent_device_is_an_error(device: Device) -> None:
    """Torch disables autocast where the device is absent, with a warning and no error."""
    absent = next((one for one in ("cuda", "mtia") if not getattr(torch, one).is_available()), None)
    if absent is None:
        pytest.skip("every device type that torch disables autocast for is here")

    def context() -> Any:
        return torch.autocast(absent, dtype=torch.bfloat16)

    policy = replace(autocast(device), context=context)
    with (
        pytest.warns(UserWarning, match="[Dd]isabl"),
        pytest.raises(DeviceError, match="`bf16` is not applied"),
    ):
        policy.verify(device)


def test_full_precision_inside_autocast_is_an_error(device: Device) -> None:
    """An autocast context around the policy is detected."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DeviceError, match="`fp32`"):
        full_precision_policy().verify(device)


@pytest.mark.parametrize(
    "promise, why",
    [
        ({"keep": "bfloat16"}, "weights under it are float32, not bfloat16"),
        ({"compute": "float16"}, "products under it are bfloat16, not float16"),
        ({"output": "float32"}, "products under it are bfloat16, not float32"),
        ({"reduce": "float64"}, "gradients of weights under it are float32, not float64"),
    ],
)
def test_a_promise_that_is_not_kept(device: Device, promise: dict[str, Any], why: str) -> None:
    """Each dtype that a policy states is compared with what is there."""
    with pytest.raises(DeviceError, match="is not applied") as caught:
        replace(autocast(device), **promise).verify(device)
    assert caught.value.why == why


class Wrong(torch.autograd.Function):
    """Passes a tensor through; adds something to it, or to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.more = backward
        return x + forward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad + ctx.more, None, None


@pytest.mark.parametrize(
    "place, wrong, what",
    [
        ("after", (1.0, 0.0), "products"),
        ("after", (0.0, 1.0), "gradients of weights"),
        ("before", (0.0, 1.0), "gradients of inputs"),
    ],
)
def test_wrong_numbers_are_an_error(
    device: Device, place: str, wrong: tuple[float, float], what: str
) -> None:
    """A recipe that computes wrongly, in forward or in backward alone, does not start a run."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(x, *wrong)  # type: ignore[no-any-return, no-untyped-call]

    def prepare(model: nn.Module) -> None:
        assert isinstance(model, nn.Sequential)
        model.insert(0 if place == "before" else 1, Module())

    policy = replace(full_precision_policy(), prepare=prepare)
    with pytest.raises(DeviceError, match=f"computes wrong {what} on device `cpu`") as caught:
        policy.verify(device)
    assert "exact in float32" in str(caught.value.why)


def test_gradients_that_do_not_exist(device: Device) -> None:
    """A recipe that cuts the graph is an error, not an untrained model."""

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().requires_grad_()

    def prepare(model: nn.Module) -> None:
        assert isinstance(model, nn.Sequential)
        model.append(Cut())

    with pytest.raises(DeviceError, match="not applied") as caught:
        replace(full_precision_policy(), prepare=prepare).verify(device)
    assert caught.value.why == "gradients of weights do not exist"


def test_a_check_of_its_own(device: Device) -> None:
    """A policy may prove more than the core can see; the core's proof is made all the same."""
    asked = []
    policy = replace(full_precision_policy(), check=lambda: asked.append(1))
    policy.verify(device)
    assert asked == [1]
    with pytest.raises(DeviceError, match="not applied"):
        replace(policy, compute="bfloat16").verify(device)


class Scaled(nn.Module):
    """A recipe's layer: products of bfloat16 weights and inputs, scaled as 8-bit formats are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax().clamp(min=1.0)
        product = (x / scale).bfloat16() @ self.weight.bfloat16().T
        return product * scale.bfloat16()


def exchange(model: nn.Module) -> None:
    """Put `Scaled` in the place of every projection."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, Scaled(child))
        else:
            exchange(child)


@pytest.fixture
def recipe() -> PrecisionPolicy:
    """A vendor's recipe that exchanges modules and needs no context."""
    names = ("scaled", "bfloat16", "float32", "float32")
    return PrecisionPolicy(*names, contextlib.nullcontext, prepare=exchange)


def test_a_recipe_that_exchanges_modules(device: Device, recipe: PrecisionPolicy) -> None:
    """The proof is made on what the recipe made: it fails without the exchange."""
    recipe.verify(device)
    with pytest.raises(DeviceError, match="products under it are float32, not bfloat16"):
        replace(recipe, prepare=None).verify(device)


def model() -> nn.Module:
    """Make two projections."""
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def test_apply_prepares_the_model(recipe: PrecisionPolicy) -> None:
    """The built model is prepared once; parameters keep names, shapes and values."""
    found = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False))
    before = dict(found.named_parameters())
    recipe.apply(found)
    assert [type(one) for one in found] == [Scaled, Scaled]
    assert dict(found.named_parameters()).keys() == before.keys()
    assert found(torch.ones(1, 6)).dtype == torch.bfloat16
    wide = model()
    double_precision_policy().apply(wide)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.append(nn.Linear(2, 2)),
        lambda found: found.pop(2),
        lambda found: found.__setitem__(2, nn.Linear(4, 3)),
    ],
)
def test_apply_refuses_other_parameters(spoil: Callable[[nn.Module], object]) -> None:
    """A recipe that adds, drops or reshapes a parameter would ruin checkpoints."""
    policy = replace(full_precision_policy(), prepare=spoil)
    with pytest.raises(PluginError, match=r"changed parameters of the model: `(2|3)\."):
        policy.apply(model())


def test_apply_sees_what_the_model_does(device: Device) -> None:
    """Weights of another dtype, and a projection whose kernel ignores the context, are errors."""
    with pytest.raises(DeviceError, match="applied in the model") as caught:
        full_precision_policy().apply(model().double())
    assert caught.value.why == "`0.weight` is float64, not float32"

    class Deaf(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    with pytest.raises(DeviceError, match="applied in the model") as caught:
        autocast(device).apply(nn.Sequential(nn.Linear(8, 8), Deaf(4, 4)))
    assert "a projection gives float32, not bfloat16" in str(caught.value.why)
    autocast(device).apply(model())


class Widening(TorchFunctionMode):
    """Context that computes some of torch's functions in float32, as a partial autocast does."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        biased = "_biased" if len(args) > 2 and args[2] is not None else ""
        if func.__name__ + biased not in self.names:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            return func(*wide, **kwargs).bfloat16()


@pytest.mark.parametrize(
    "names, why",
    [
        (
            ["linear_biased"],
            "3 of 12 products are in float32, not bfloat16: mm 2 (backward), addmm 1",
        ),
        (
            ["matmul"],
            "6 of 12 products are in float32, not bfloat16: bmm 6 (2 forward, 4 backward)",
        ),
        (["matmul", "linear_biased"], "9 of 12 products are in float32"),
    ],
)
def test_an_autocast_that_covers_some_products_is_an_error(
    device: Device, names: list[str], why: str
) -> None:
    """Products with bias, and the products of attention, are verified beside the plain ones."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16), Widening(*names):
            yield

    with pytest.raises(DeviceError, match="`bf16` is not applied on device `cpu`") as caught:
        replace(autocast(device), context=context).verify(device)
    assert str(caught.value.why).startswith(why)


class OnePassWide(torch.autograd.Function):
    """A projection in bfloat16 whose forward or backward pass computes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = torch.float32 if wide == "backward" else torch.bfloat16
        dtype = torch.float32 if wide == "forward" else torch.bfloat16
        return (x.to(dtype) @ weight.to(dtype).T).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = (saved.to(ctx.dtype) for saved in ctx.saved_tensors)
        grad = grad.to(ctx.dtype)
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return (grad @ weight).to(torch.float32), grad_weight.float(), None


@pytest.mark.parametrize("wide", ["forward", "backward"])
def test_one_pass_in_another_dtype_is_an_error(device: Device, wide: str) -> None:
    """The dtypes that are visible outside are right; products of one pass are not."""

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, w=module.weight: OnePassWide.apply(x, w, wide)  # type: ignore[method-assign]

    policy = PrecisionPolicy(
        "half", "bfloat16", "float32", "float32", contextlib.nullcontext, prepare=prepare
    )
    with pytest.raises(DeviceError, match="`half` is not applied on device") as caught:
        policy.verify(device)
    count = 2 if wide == "forward" else 4
    assert f"{count} of 12 products are in float32, not bfloat16" in str(caught.value.why)
    assert f"mm {count} ({wide})" in str(caught.value.why)
    with pytest.raises(DeviceError, match="`half` is not applied in the model") as caught:
        policy.apply(nn.Sequential(nn.Linear(16, 16)))
    assert f"({wide})" in str(caught.value.why)


def test_a_narrow_format_that_no_projection_has_is_an_error(device: Device) -> None:
    """Products in the dtype of the results do not pass for products of the narrower factors."""
    policy = replace(autocast(device), name="fp8", compute="float8_e4m3fn", output="bfloat16")
    with pytest.raises(DeviceError, match="`fp8` is not applied") as caught:
        policy.verify(device)
    assert "are in bfloat16, not float8_e4m3fn: mm 5" in str(caught.value.why)


def test_verification_leaves_gradients_and_buffers(device: Device) -> None:
    """A model that is verified again in training keeps its gradients and buffers."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    found = Counting()
    gradient = found.weight.grad = torch.ones(4, 4)
    autocast(device).verify_model(found)
    assert found.weight.grad is gradient
    assert found.weight.grad.eq(1).all()
    assert found.calls == 0


def test_products_are_counted(device: Device) -> None:
    """Factors count, not what is added; ops of other libraries by the narrowest visible dtype."""
    assert device.type == "cpu"
    x = torch.ones(2, 4, 4, requires_grad=True)
    with ProductCounter() as counter:
        with counter.part("head"):
            torch.addmm(torch.ones(4, dtype=torch.float64).float(), x[0], x[1])
        (x.bfloat16() @ x.bfloat16()).float().sum().backward()
        functional.scaled_dot_product_attention(x[None], x[None], x[None])
        torch.conv1d(x, torch.ones(4, 4, 1))
        torch.ones(3).cumsum(0)
    found = {(each.op, each.dtype, each.backward, each.part) for each in counter.products}
    assert found == {
        ("addmm", "float32", False, "head"),
        ("bmm", "bfloat16", False, "layers"),
        ("bmm", "bfloat16", True, "layers"),
        ("_scaled_dot_product_flash_attention_for_cpu", "float32", False, "layers"),
        ("convolution", "float32", False, "layers"),
    }


def test_a_prepare_that_changes_nothing_is_told(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so; one that exchanges a forward, or has nothing to do, is quiet."""

    def exact(model: nn.Module) -> None:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = module.forward  # type: ignore[method-assign]

    class Projection(nn.Linear):
        """A subclass, as the models of lmcore have."""

    looking = replace(autocast(device), prepare=exact)
    looking.apply(nn.Sequential(Projection(8, 8)))
    assert "precision `bf16`: its `prepare` changed nothing: it found no module" in caplog.text
    caplog.clear()
    looking.apply(nn.Sequential(nn.Linear(8, 8)))
    autocast(device).apply(nn.Sequential(Projection(8, 8)))
    double_precision_policy().apply(nn.Sequential(nn.Linear(8, 8)).double())
    assert not caplog.text


def test_wide_attention_is_known(device: Device) -> None:
    """Autocast narrows the reference of attention; without it, it widens."""
    assert not wide_attention(autocast(device), device)
    names = ("pure", "bfloat16", "bfloat16", "bfloat16")

    def narrow(model: nn.Module) -> None:
        model.bfloat16()

    pure = PrecisionPolicy(*names, contextlib.nullcontext, prepare=narrow)
    assert wide_attention(pure, device) == "float32"
