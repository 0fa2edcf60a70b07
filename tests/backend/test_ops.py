"""Every kernel of every present accelerator against the op's reference in float64."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.contract import OP_SPECS, OpContext, OpSpec
from lmcore.contract.op.records import load_target

SPECS = {spec.name: spec for spec in OP_SPECS}
DTYPES = ("float64", "float32", "bfloat16", "float16")
IN_PLACE = {"adamw", "grad_norm"}


def kernels(accelerator: Any, op: str, dtype: str) -> list[tuple[str, Any]]:
    """Return id and function of every kernel that says it does the op in this dtype."""
    context = OpContext(accelerator.device.type, dtype)
    return [
        (impl.id, load_target(impl.load))
        for impl in accelerator.impls
        if impl.op == op and (impl.supports is None or impl.supports(context) is None)
    ]


def call(
    function: Any, case: Any, dtype: torch.dtype, device: torch.device, *, backward: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of a fixed weighting of it."""
    inputs: dict[int, Any] = {
        place: value.to(device) if isinstance(value, Tensor) else value
        for place, value in case.others.items()
    }
    for place, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[place] = value.to(dtype)
    leaves = {}
    for place, values in case.tensors.items():
        # `to` keeps the strides of what it converts.
        leaves[place] = (
            values.to(device).to(dtype).detach().clone(memory_format=torch.preserve_format)
        )
        leaves[place].requires_grad_(backward)
    arguments = [{**inputs, **leaves}[place] for place in range(len(inputs) + len(leaves))]
    kwargs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in case.kwargs.items()
    }
    out = function(*arguments, **kwargs)
    if not backward:
        return out, []
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(device)
    grads = torch.autograd.grad((out.double() * weights).sum(), list(leaves.values()))
    return out.detach(), list(grads)


def rounded(case: Any, dtype: torch.dtype) -> Any:
    """Return the case with inputs that *dtype* can hold, so that only arithmetic differs."""

    def through(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype).double() if floating else value

    tensors = {place: through(value) for place, value in case.tensors.items()}
    others = {place: through(value) for place, value in case.others.items()}
    return dataclasses.replace(case, tensors=tensors, others=others)


def assert_close(found: Tensor, wanted: Tensor, spec: OpSpec, dtype: str, what: str) -> None:
    """Compare at the spec's tolerance; gradients are sums, so their scale is their largest."""
    assert found.shape == wanted.shape, what
    if not found.numel():
        return
    tolerance = spec.tolerances[dtype]
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(
        found.double().cpu(),
        wanted.cpu(),
        rtol=tolerance.relative,
        atol=tolerance.absolute * scale,
        msg=lambda text: f"{what}: {text}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_match_the_reference(accelerator: Any, case: Any, dtype: str) -> None:
    """Every kernel, and the reference itself, agrees with float64 forward and backward."""
    spec, device = SPECS[case.op], accelerator.device
    if dtype not in device.dtypes:
        pytest.skip(f"device `{device.type}` does not compute in {dtype}")
    reference = load_target(spec.reference)
    held = rounded(case, getattr(torch, dtype))
    wanted, wanted_grads = call(
        reference, held, torch.float64, torch.device("cpu"), backward=spec.has_backward
    )
    for name, kernel in [("reference", reference), *kernels(accelerator, case.op, dtype)]:
        out, grads = call(
            kernel, held, getattr(torch, dtype), device.torch_device, backward=spec.has_backward
        )
        what = f"{case.op}/{name} ({case.label}, {dtype})"
        assert_close(out, wanted, spec, dtype, what)
        for place, (found, expected) in enumerate(zip(grads, wanted_grads, strict=True)):
            assert found.dtype == getattr(torch, dtype), what
            assert_close(found, expected, spec, dtype, f"{what}, gradient {place}")


def test_every_op_has_cases(cases: Any) -> None:
    """An op that joins the core joins these tests."""
    assert {case.op for case in cases} | IN_PLACE == set(SPECS)


def test_the_cases_ask_for_the_gradients_that_the_ops_promise(case: Any) -> None:
    """Each argument that gets a gradient by the op's spec is compared, where it is given."""
    spec = SPECS[case.op]
    parameters = list(inspect.signature(load_target(spec.reference)).parameters)
    promised = {parameters.index(name) for name in spec.gradients}
    absent = {place for place, value in case.others.items() if value is None}
    assert set(case.tensors) == promised - absent


def test_kernels_leave_their_inputs_alone(accelerator: Any, case: Any) -> None:
    """Neither the arguments nor the incoming gradient change, and a second pass gives the same."""
    device = accelerator.device.torch_device
    for name, kernel in kernels(accelerator, case.op, "float32"):
        arguments = {
            place: value.to(device, torch.float32 if value.is_floating_point() else None).clone()
            for place, value in {**case.tensors, **case.others}.items()
            if isinstance(value, Tensor)
        }
        before = {place: value.clone() for place, value in arguments.items()}
        for place in case.tensors:
            arguments[place].requires_grad_()
        merged = {**case.others, **arguments}
        out = kernel(*[merged[place] for place in range(len(merged))], **case.kwargs)
        grad = torch.randn_like(out)
        kept = grad.clone()
        leaves = [arguments[place] for place in case.tensors]
        first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        second = torch.autograd.grad(out, leaves, grad)
        for place, value in before.items():
            assert torch.equal(
                torch.nan_to_num(arguments[place].detach()), torch.nan_to_num(value)
            ), (name, place)
        assert torch.equal(grad, kept), name
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other), name


KEEP_DTYPE = (
    *("attention", "layer_norm", "bias_gelu", "rms_norm", "swiglu"),
    *("scaled_masked_softmax", "rotary_embedding", "bias_dropout_add"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", KEEP_DTYPE)
def test_outputs_keep_the_dtype_of_their_input(
    accelerator: Any, cases: Any, op: str, dtype: str
) -> None:
    """A kernel returns what the reference returns: its first input's dtype."""
    if dtype not in accelerator.device.dtypes:
        pytest.skip(f"device does not compute in {dtype}")
    case = next(case for case in cases if case.op == op)
    for name, kernel in kernels(accelerator, op, dtype):
        out, _ = call(
            kernel, case, getattr(torch, dtype), accelerator.device.torch_device, backward=False
        )
        assert out.dtype == getattr(torch, dtype), name


def test_mixed_dtypes_of_autocast(accelerator: Any) -> None:
    """Activations in bfloat16 with weights in float32, as autocast leaves them, work everywhere.

    The output has the first input's dtype, or the residual's; each gradient its input's dtype.
    """
    device = accelerator.device
    if "bfloat16" not in device.dtypes:
        pytest.skip("device does not compute in bfloat16")
    x_BSH = torch.randn(2, 3, 8, device=device.torch_device).bfloat16().requires_grad_()
    gain_H = torch.randn(8, device=device.torch_device, requires_grad=True)
    wide_BSH = torch.randn(2, 3, 8, device=device.torch_device, requires_grad=True)
    angle_SR = torch.randn(3, 4, device=device.torch_device)
    rest = {"dropout": 0.0, "training": True}
    leaves = [x_BSH, gain_H, wide_BSH]
    for op, arguments, named, dtype in (
        ("layer_norm", (x_BSH, gain_H, gain_H, 1e-5), {}, torch.bfloat16),
        ("rms_norm", (x_BSH, gain_H, 1e-6), {}, torch.bfloat16),
        ("bias_gelu", (x_BSH, gain_H), {}, torch.bfloat16),
        ("bias_dropout_add", (x_BSH, gain_H, wide_BSH), rest, torch.float32),
        ("bias_dropout_add", (x_BSH, None, wide_BSH), rest, torch.float32),
        (
            "rotary_embedding",
            (x_BSH.unsqueeze(1), angle_SR.cos(), angle_SR.sin()),
            {},
            torch.bfloat16,
        ),
    ):
        oracle = [one.double() if isinstance(one, Tensor) else one for one in arguments]
        wanted = load_target(SPECS[op].reference)(*oracle, **named)
        wanted_grads = torch.autograd.grad(wanted.sum(), leaves, allow_unused=True)
        for name, kernel in kernels(accelerator, op, "bfloat16"):
            out = kernel(*arguments, **named)
            what = f"{op}/{name}"
            assert out.dtype == dtype, what
            assert_close(out.detach(), wanted.detach(), SPECS[op], "bfloat16", what)
            grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            for leaf, grad, expected in zip(leaves, grads, wanted_grads, strict=True):
                assert (grad is None) == (expected is None), what
                if expected is not None:
                    assert grad.dtype == leaf.dtype, what
                    assert_close(grad, expected.double(), SPECS[op], "bfloat16", what)


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_losses_are_summed_in_at_least_float32(accelerator: Any, cases: Any, op: str) -> None:
    """A loss of bfloat16 inputs is a float32 number."""
    case = next(case for case in cases if case.op == op)
    if "bfloat16" not in accelerator.device.dtypes:
        pytest.skip("device does not compute in bfloat16")
    for name, kernel in kernels(accelerator, op, "bfloat16"):
        out, _ = call(kernel, case, torch.bfloat16, accelerator.device.torch_device, backward=False)
        assert out.dtype == torch.float32, name


def test_no_target_is_passed_over(accelerator: Any) -> None:
    """A target outside the vocabulary is an error and not a token that counts for nothing."""
    if accelerator.device.type != "cpu":
        pytest.skip("an assertion on the device would end the process")
    for _, kernel in kernels(accelerator, "cross_entropy", "float32"):
        for bad in (-100, 9):
            with pytest.raises((IndexError, RuntimeError)):
                kernel(torch.zeros(2, 9), torch.tensor([0, bad]))


def adamw_state(device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return weights, gradients, moments and step counts of several layouts and sizes."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(5,), (3, 7), (1,), (2, 3, 4)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    params = [draw(*shape) for shape in shapes] + [draw(7, 3).t()]
    grads = [draw(*shape) for shape in shapes] + [draw(3, 7)]
    grads[1] = draw(7, 3).t()
    averages = [draw(*param.shape) for param in params]
    squares = [draw(*param.shape).square() for param in params]
    steps = [torch.tensor(float(count)) for count in (0, 1, 5, 100, 0)]
    return [params, grads, averages, squares, steps]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adamw_kernels_match_the_reference(accelerator: Any, dtype: str) -> None:
    """Three steps update weights, moments and counts as float64 does, in any memory layout."""
    if dtype not in accelerator.device.dtypes:
        pytest.skip(f"device does not compute in {dtype}")
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    for name, kernel in kernels(accelerator, "adamw", dtype):
        state = adamw_state(accelerator.device.torch_device, getattr(torch, dtype))
        oracle = [[one.double().cpu().clone() for one in part] for part in state]
        for _ in range(3):
            kernel(*state, **settings)
            load_target(SPECS["adamw"].reference)(*oracle, **settings)
        for part in (0, 2, 3, 4):
            for found, wanted in zip(state[part], oracle[part], strict=True):
                assert_close(found, wanted, SPECS["adamw"], dtype, f"adamw/{name}, part {part}")
        assert all(step.dtype == torch.float32 for step in state[4])


def test_adamw_takes_weights_of_several_dtypes(accelerator: Any) -> None:
    """Weights of two dtypes in one call, with gradients in another, are each updated rightly."""
    device = accelerator.device.torch_device
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    for name, kernel in kernels(accelerator, "adamw", "float32"):
        parts = [
            [one if place % 2 else one.double() for place, one in enumerate(part)]
            for part in adamw_state(device, torch.float32)[:4]
        ]
        parts[1] = [grad.bfloat16() for grad in parts[1]]
        steps = [torch.tensor(0.0) for _ in parts[0]]
        oracle = [[one.double().clone() for one in part] for part in [*parts, steps]]
        kernel(*parts, steps, **settings)
        load_target(SPECS["adamw"].reference)(*oracle, **settings)
        for found, wanted in zip(parts[0], oracle[0], strict=True):
            assert_close(found, wanted, SPECS["adamw"], "float32", f"adamw/{name}")


def test_adamw_without_weights_does_nothing(accelerator: Any) -> None:
    """An empty list is a valid, empty step."""
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    for _, kernel in kernels(accelerator, "adamw", "float32"):
        kernel([], [], [], [], [], **settings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_norm_kernels_match_the_reference(accelerator: Any, dtype: str) -> None:
    """The norm over tensors of any layout is float64's, in at least float32."""
    device = accelerator.device
    if dtype not in device.dtypes:
        pytest.skip(f"device does not compute in {dtype}")
    grads = [one.to(device.torch_device, getattr(torch, dtype)) for one in (
        torch.randn(1000), torch.randn(3, 7).t(), torch.zeros(5), torch.randn(()), torch.randn(0)
    )]  # fmt: skip
    wanted = torch.sqrt(sum(grad.double().square().sum() for grad in grads)).cpu()
    for name, kernel in [
        ("reference", load_target(SPECS["grad_norm"].reference)),
        *kernels(accelerator, "grad_norm", dtype),
    ]:
        found = kernel(grads)
        assert found.dtype == (torch.float64 if dtype == "float64" else torch.float32), name
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-6, atol=0)
        assert kernel([]).item() == 0.0


def test_grad_norm_is_non_finite_for_non_finite_values(accelerator: Any) -> None:
    """A NaN or an infinity in one gradient reaches the norm."""
    for name, kernel in kernels(accelerator, "grad_norm", "float32"):
        for value in (float("nan"), float("inf")):
            grads = [torch.ones(3), torch.tensor([1.0, value])]
            assert not torch.isfinite(kernel(grads)), name


def test_kernels_that_claim_determinism_repeat_their_bits(accelerator: Any, cases: Any) -> None:
    """Two calls of a kernel that claims to be deterministic give the same bits."""
    for impl in accelerator.impls:
        if "deterministic" not in impl.traits:
            continue
        for case in (case for case in cases if case.op == impl.op):
            device = accelerator.device.torch_device
            runs = [
                call(load_target(impl.load), case, torch.float32, device, backward=True)
                for _ in range(2)
            ]
            assert torch.equal(runs[0][0], runs[1][0]), impl
            for first, second in zip(runs[0][1], runs[1][1], strict=True):
                assert torch.equal(first, second), impl


def test_attention_dropout_drops_and_rescales(accelerator: Any) -> None:
    """With dropout the mean over many draws stays, and single draws differ."""
    device = accelerator.device
    shape = (1, 1, 4, 8)
    q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(one)) for one in (1, 2))
    q, k = q.to(device.torch_device), k.to(device.torch_device)
    v = torch.ones(shape, device=device.torch_device)
    for name, kernel in kernels(accelerator, "attention", "float32"):
        device.seed(0)
        draws = torch.stack([kernel(q, k, v, causal=True, dropout=0.5) for _ in range(400)])
        assert draws.std(0).max() > 0.1, name
        torch.testing.assert_close(draws.mean(0), v, rtol=0, atol=0.2)


@pytest.fixture
def added(accelerator: Any) -> Any:
    """Return a function that adds a branch of ones to a residual of zeros by a kernel.

    It returns the output and the gradients of its sum, weighted by powers of two.
    """
    device = accelerator.device

    def add(kernel: Any, dropout: float, size: tuple[int, ...], **more: Any) -> tuple[Tensor, ...]:
        x = torch.full(size, 0.75, device=device.torch_device, requires_grad=True)
        bias = torch.full(size[-1:], 0.25, device=device.torch_device, requires_grad=True)
        residual = torch.zeros(size, device=device.torch_device, requires_grad=True)
        out = kernel(x, bias, residual, dropout=dropout, **{"training": True, **more})
        return (out.detach(), *torch.autograd.grad(out, [x, bias, residual], _weights(out)))

    return add


def _weights(like: Tensor) -> Tensor:
    """Return 1, 2, 4, 8 in turn: products with them are exact."""
    places = torch.arange(like.numel(), device=like.device).view(like.shape)
    return (2.0 ** (places % 4)).to(like.dtype)


@pytest.mark.parametrize("dropout", [0.002, 0.1, 0.5, 0.9, 0.995])
def test_dropped_channels_match_the_probability(
    accelerator: Any, added: Any, dropout: float
) -> None:
    """The share is the probability's, survivors are scaled up, and the mean stays 1."""
    size = (7, 41, 701)
    count = size[0] * size[1] * size[2]
    for name, kernel in kernels(accelerator, "bias_dropout_add", "float32"):
        accelerator.device.seed(3)
        out, grad_x, grad_bias, grad_residual = added(kernel, dropout, size)
        kept = out != 0
        share = kept.double().mean().item()
        deviation = (dropout * (1 - dropout) / count) ** 0.5
        assert abs(share - (1 - dropout)) < 4 * deviation + 1 / 65536, name
        torch.testing.assert_close(
            out[kept], torch.full_like(out[kept], 1 / (1 - dropout)), rtol=2e-3, atol=0
        )
        assert abs(out.double().mean().item() - 1) < 5 * deviation / (1 - dropout), name
        weights = _weights(out)
        assert torch.equal(grad_x, out * weights), f"{name}: gradients pass where values did"
        assert torch.equal(grad_residual, weights), name
        torch.testing.assert_close(grad_bias, grad_x.sum((0, 1)))


def test_dropout_is_drawn_for_each_channel_by_itself(accelerator: Any, added: Any) -> None:
    """Neighbours are dropped independently, at every distance at which a kernel may share draws."""
    for name, kernel in kernels(accelerator, "bias_dropout_add", "float32"):
        accelerator.device.seed(4)
        kept = (added(kernel, 0.5, (8, 64, 512))[0] != 0).double().flatten() - 0.5
        for distance in (1, 2, 3, 4, 5, 8, 512):
            together = (kept[:-distance] * kept[distance:]).mean().item() * 4
            assert abs(together) < 4 / kept.numel() ** 0.5, (name, distance)


def test_dropout_follows_the_random_state(accelerator: Any, added: Any) -> None:
    """The same state drops the same channels, the next draw others: recomputation relies on it."""
    for name, kernel in kernels(accelerator, "bias_dropout_add", "float32"):
        accelerator.device.seed(5)
        first, second = (added(kernel, 0.3, (2, 3, 101))[0] for _ in range(2))
        accelerator.device.seed(5)
        assert torch.equal(added(kernel, 0.3, (2, 3, 101))[0], first), name
        assert not torch.equal(first, second), name


def test_nothing_is_dropped_in_evaluation(accelerator: Any, added: Any) -> None:
    """With `training` off, and with a probability of 0, the op is a sum."""
    for name, kernel in kernels(accelerator, "bias_dropout_add", "float32"):
        for out, *_ in (
            added(kernel, 0.5, (2, 3, 5), training=False),
            added(kernel, 0.0, (2, 3, 5)),
        ):
            assert torch.equal(out, torch.ones_like(out)), name


def test_a_probability_of_one_drops_everything(accelerator: Any, added: Any) -> None:
    """The residual is left, without NaN."""
    for name, kernel in kernels(accelerator, "bias_dropout_add", "float32"):
        out, grad_x, _, _ = added(kernel, 1.0, (2, 3, 5))
        assert not out.any(), name
        assert not grad_x.any(), name
