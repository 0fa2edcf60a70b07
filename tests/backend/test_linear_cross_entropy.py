"""The CPU's chunked head: block boundaries, absent gradients, scaled losses, mixed dtypes.

The oracle is plain float64 arithmetic written out here, with the gradients in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmcore.contract.op.reference import linear_cross_entropy as reference
from lmcore_cpu.kernel import linear_cross_entropy as module
from lmcore_cpu.kernel.linear_cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 13, 7, 37


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
    target = torch.randint(VOCAB, (tokens,), generator=generator)
    loss_weight = torch.rand(tokens, dtype=torch.float64, generator=generator)
    loss_weight[::3] = 0.0
    return [hidden.to(dtype), weight.to(dtype), target, loss_weight.to(dtype)]


def oracle(hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Return loss and both gradients: softmax minus one-hot, times the token's weight."""
    hidden, weight, scale = hidden.double(), weight.double(), scale.double()
    logits = hidden @ weight.T
    shifted = logits - logits.amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    one_hot = torch.zeros_like(log_p)
    one_hot[torch.arange(len(target)), target] = 1.0
    delta = (log_p.exp() - one_hot) * scale[:, None]
    return -(log_p * one_hot).sum(-1) @ scale, delta @ weight, delta.T @ hidden


@pytest.fixture(params=[1, 2, 5, 12, 13, 14], ids=lambda rows: f"{rows} rows a block")
def block_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of so many tokens: one, some with a remainder, one short of all, all, more."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", request.param * VOCAB * 4)
    return int(request.param)


def test_block_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks fit the limit and are about equal; there is always a row."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 5 * VOCAB * 4)
    assert module._block_rows(13, VOCAB) == 5  # 5, 5, 3
    assert module._block_rows(11, VOCAB) == 4  # 4, 4, 3, and not 5, 5, 1
    assert module._block_rows(5, VOCAB) == 5
    assert module._block_rows(0, VOCAB) == 1
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    assert module._block_rows(13, VOCAB) == 1


def test_matches_the_oracle(block_of: int) -> None:
    """Loss and gradients are exact to float64 at every block size, weights of zero among them."""
    hidden, weight, target, scale = inputs()
    loss, hidden_grad, weight_grad = oracle(hidden, weight, target, scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_cross_entropy(hidden, weight, target, scale)
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, hidden_grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, weight_grad, rtol=1e-12, atol=1e-12)
    assert hidden.grad is not None
    assert not hidden.grad[::3].any()


def test_several_blocks_are_used(block_of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit does cut the tokens up: there is one product of logits a block."""
    sizes: list[int] = []
    softmax = torch.softmax

    def counted(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        sizes.append(len(x))
        return softmax(x, *args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "softmax", counted)
    linear_cross_entropy(*inputs())
    assert sum(sizes) == TOKENS
    assert max(sizes) <= block_of
    assert len(sizes) == -(-TOKENS // min(block_of, TOKENS))


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_one_gradient(wanted: str) -> None:
    """An input without a required gradient gets none, if only the other requires one."""
    hidden, weight, target, scale = inputs()
    _, *grads = oracle(hidden, weight, target, scale)
    asks, other = (hidden, weight) if wanted == "hidden" else (weight, hidden)
    asks.requires_grad_()
    linear_cross_entropy(hidden, weight, target, scale).backward()
    torch.testing.assert_close(asks.grad, grads[0 if wanted == "hidden" else 1])
    assert other.grad is None


@pytest.mark.parametrize("factor", [0.5, -3.0, 0.0])
def test_scaled_loss(factor: float) -> None:
    """A loss that is scaled afterwards scales the gradients, and leaves what was kept alone."""
    hidden, weight, target, scale = inputs()
    _, hidden_grad, weight_grad = oracle(hidden, weight, target, scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, scale)
    (loss * factor).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, hidden_grad * factor)
    torch.testing.assert_close(weight.grad, weight_grad * factor)
    hidden.grad = weight.grad = None
    loss.backward()
    torch.testing.assert_close(hidden.grad, hidden_grad)
    torch.testing.assert_close(weight.grad, weight_grad)


def test_gradients_add_up() -> None:
    """Two losses of one weight add their gradients, as micro-batches do."""
    hidden, weight, target, scale = inputs()
    _, _, once = oracle(hidden, weight, target, scale)
    weight.requires_grad_()
    for _ in range(2):
        linear_cross_entropy(hidden, weight, target, scale).backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_no_gradient_is_computed_without_need(
    block_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients off the loss is the same, and the backward pass's products are not done."""
    hidden, weight, target, scale = inputs()
    loss, *_ = oracle(hidden, weight, target, scale)
    weight.requires_grad_()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch, "addmm", refuse)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, target, scale)
    torch.testing.assert_close(found, loss)
    assert not found.requires_grad
    with pytest.raises(AssertionError, match="a gradient"):
        linear_cross_entropy(hidden, weight, target, scale)


def test_weights_of_zero() -> None:
    """Loss and gradients are zero, not NaN, if no token counts."""
    hidden, weight, target, scale = inputs(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, torch.zeros_like(scale))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_no_tokens() -> None:
    """A batch without tokens has a loss of zero and gradients of zero."""
    hidden, weight, target, scale = inputs(torch.float32, tokens=0)
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, scale)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_large_logits() -> None:
    """Logits in the thousands neither overflow nor lose the loss."""
    hidden, weight, target, scale = inputs(torch.float32)
    hidden = (hidden * 1000).requires_grad_()
    loss, hidden_grad, _ = oracle(hidden.detach(), weight, target, scale)
    found = linear_cross_entropy(hidden, weight, target, scale)
    found.backward()
    torch.testing.assert_close(found.detach().double(), loss, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-4, atol=1e-4)


def test_inputs_are_left_alone() -> None:
    """The kernel reuses its own memory only; inputs that lie transposed work as well."""
    hidden, weight, target, scale = inputs()
    strided = weight.t().contiguous().t()
    before = [one.clone() for one in (hidden, strided, target, scale)]
    hidden.requires_grad_()
    found = linear_cross_entropy(hidden, strided, target, scale)
    found.backward()
    assert all(
        torch.equal(a, b) for a, b in zip((hidden, strided, target, scale), before, strict=True)
    )
    torch.testing.assert_close(found.detach(), oracle(*before)[0])


@pytest.mark.parametrize(
    "hidden_dtype, weight_dtype",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_dtypes_of_autocast(
    give_facts: Callable[..., None],
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    *,
    native: bool,
    autocast: bool,
) -> None:
    """Activations and weights of different dtypes, in and out of autocast.

    The precision is float32's, but under autocast on a processor that multiplies bfloat16, where it
    is bfloat16's.  The loss is float32 and every gradient has its input's dtype, whatever the
    mixture.
    """
    give_facts(bfloat16_products=native)
    hidden, weight, target, scale = inputs()
    hidden, weight, scale = hidden.to(hidden_dtype), weight.to(weight_dtype), scale.float()
    loss, *grads = oracle(hidden, weight, target, scale)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = linear_cross_entropy(hidden, weight, target, scale)
    found.backward()
    assert found.dtype == torch.float32
    is_wide = not (native and autocast)
    close = torch.allclose(found.detach().double(), loss, rtol=1e-5, atol=1e-5)
    assert close == is_wide
    torch.testing.assert_close(found.detach().double(), loss, rtol=1e-2, atol=1e-2)
    for one, wanted in zip((hidden, weight), grads, strict=True):
        assert one.grad is not None
        assert one.grad.dtype == one.dtype
        tolerance = 1e-5 if one.dtype == torch.float32 and is_wide else 2e-2
        torch.testing.assert_close(one.grad.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [TOKENS, 2])
def test_all_bfloat16_is_no_worse_than_the_reference(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """With bfloat16 throughout and float32 loss weights, the error is bfloat16's own.

    Blocks of tokens add no error: the sum over them is float32.

    Both are compared with float64 on the same rounded inputs; twice the reference's error, plus
    one rounding, is the bound.
    """
    monkeypatch.setattr(module, "_BLOCK_BYTES", rows * VOCAB * 4)
    hidden, weight, target, scale = inputs(torch.bfloat16)
    scale = scale.float()
    loss, hidden_grad, weight_grad = oracle(hidden, weight, target, scale)

    def errors(function: Callable[..., Tensor]) -> list[float]:
        one, other = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = function(one, other, target, scale)
        assert found.dtype == torch.float32
        found.backward()
        assert one.grad is not None
        assert other.grad is not None
        pairs = ((found, loss), (one.grad, hidden_grad), (other.grad, weight_grad))
        return [float((a.detach().double() - b).abs().max() / b.abs().max()) for a, b in pairs]

    ours = errors(linear_cross_entropy)
    assert ours[0] <= 2**-8
    for found, bound in zip(ours, errors(reference), strict=True):
        assert found <= 2 * bound + 2**-8


@pytest.mark.parametrize("blas_is_faster", [False, True])
def test_the_products_by_processor(
    monkeypatch: pytest.MonkeyPatch, give_facts: Callable[..., None], *, blas_is_faster: bool
) -> None:
    """Both products give the loss; on processors with the faster BLAS oneDNN is not called."""
    give_facts(mkl=True, prefers_mkl=blas_is_faster, onednn=True)
    calls: list[int] = []
    monkeypatch.setattr(module, "product", lambda x, weight: (calls.append(1), x @ weight.t())[1])
    hidden, weight, target, scale = inputs(torch.float32)
    loss, *_ = oracle(hidden, weight, target, scale)
    found = linear_cross_entropy(hidden, weight, target, scale)
    torch.testing.assert_close(found.double(), loss, rtol=1e-5, atol=1e-5)
    assert bool(calls) != blas_is_faster


def test_improbable_targets() -> None:
    """A target whose probability underflows in float32 has its exact loss, and gradients."""
    hidden, weight, target, scale = inputs()
    hidden = hidden * 300.0  # logits hundreds apart: most probabilities are exactly 0
    loss, hidden_grad, weight_grad = oracle(hidden, weight, target, scale)
    narrow = hidden.float().requires_grad_()
    narrow_weight = weight.float().requires_grad_()
    found = linear_cross_entropy(narrow, narrow_weight, target, scale.float())
    found.backward()
    assert math.isfinite(loss.item())
    torch.testing.assert_close(found.detach().double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(narrow.grad.double(), hidden_grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(narrow_weight.grad.double(), weight_grad, rtol=1e-4, atol=1e-2)


def test_infinite_logits_give_no_finite_loss() -> None:
    """An infinite input is seen in the loss; it is not hidden by the way the loss is computed."""
    hidden, weight, target, scale = inputs()
    hidden[3] = float("inf")
    assert not math.isfinite(linear_cross_entropy(hidden, weight, target, scale).item())
