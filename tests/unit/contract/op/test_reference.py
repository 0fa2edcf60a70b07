"""The references against oracles of other code: torch's own functions, and sums made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from lmcore.contract import OP_SPECS
from lmcore.contract.op import reference, torch_kernels
from lmcore.contract.op.records import load_target


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def gradients(function, *tensors):
    """Return output and gradients of a weighted sum."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out, *torch.autograd.grad((out * randn(*out.shape, seed=8)).sum(), leaves)]


def assert_same(function, oracle, *tensors):
    """Compare values and gradients in float64."""
    found, wanted = gradients(function, *tensors), gradients(oracle, *tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_every_spec_loads():
    """The specs name references that exist, with tolerances for every float dtype."""
    for spec in OP_SPECS:
        assert callable(load_target(spec.reference))
        assert set(spec.tolerances) == {"float64", "float32", "bfloat16", "float16"}
    assert sorted(spec.name for spec in OP_SPECS) == sorted(reference.__all__)


def test_attention_by_hand():
    """One head of one channel: two keys, softmax of 1 and 2, weights e^-1 apart."""
    q = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0], [2.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[10.0], [20.0]]]], dtype=torch.float64)
    weight = 1.0 / (1.0 + math.exp(-1.0))
    wanted = torch.tensor([[[[10.0 * (1 - weight) + 20.0 * weight]]]], dtype=torch.float64)
    close(reference.attention(q, k, v, causal=False), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_as_torchs_math(causal):
    """Square attention is torch's, forward and backward."""

    def oracle(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def found(q, k, v):
        return reference.attention(q, k, v, causal=causal)

    assert_same(found, oracle, *(randn(2, 3, 7, 5, seed=one) for one in range(3)))


def test_attention_on_a_cache_is_the_end_of_the_whole():
    """The last queries on all keys give the last rows of attention over everything."""
    q, k, v = (randn(2, 3, 9, 4, seed=one) for one in range(3))
    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for last in (1, 4):
        close(reference.attention(q[:, :, -last:], k, v, causal=True), whole[:, :, -last:])


def test_grouped_attention_repeats_keys():
    """Query head n uses key head n // group."""
    q, k, v = randn(2, 6, 5, 4), randn(2, 2, 5, 4, seed=1), randn(2, 2, 5, 4, seed=2)
    out = reference.attention(q, k, v, causal=True)
    for head in range(6):
        one = [q[:, head], k[:, head // 3], v[:, head // 3]]
        close(out[:, head], functional.scaled_dot_product_attention(*one, is_causal=True))


def test_attention_mask_hides_where_true():
    """Hidden keys get no weight, and a row without keys gives zeros."""
    q, k, v = (randn(1, 1, 3, 4, seed=one) for one in range(3))
    mask = torch.tensor([[False, True, False], [True, True, True], [False, False, True]])
    out = reference.attention(q, k, v, causal=False, mask=mask)
    wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
    close(out[..., [0, 2], :], wanted[..., [0, 2], :])
    assert not out[..., 1, :].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [reference.attention, torch_kernels.attention])
def test_attention_adds_a_bias(attend, causal):
    """A mask of floating-point numbers is added after the scale, and -inf hides."""
    q, k, v = (randn(2, 3, length, 4, seed=length) for length in (3, 5, 6))
    v, bias = v[:, :, :5], randn(3, 3, 5)
    bias[..., 1] = -math.inf
    later = torch.ones(3, 5, dtype=torch.bool).triu(3)
    scores = torch.einsum("bnsd,bntd->bnst", q, k) / 2 + bias
    if causal:
        scores[..., later] = -math.inf
    expected = torch.softmax(scores, -1) @ v
    found = attend(q, k, v, causal=causal, mask=bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend", [reference.attention, torch_kernels.attention])
def test_a_bias_gets_its_gradient(attend):
    """It is the sum over the samples that share the bias, and 0 where a key is hidden."""
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[1, 2:] = True

    def oracle(q, k, v, bias):
        scores = torch.einsum("bnsd,bntd->bnst", q, k) / 2 + bias
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    def found(q, k, v, bias):
        return attend(q, k, v, causal=False, mask=bias.masked_fill(hidden, -math.inf))

    q, k, v = (randn(2, 3, length, 4, seed=length) for length in (3, 5, 6))
    assert_same(found, oracle, q, k, v[:, :, :5], randn(1, 3, 3, 5))


def test_norms_as_torchs():
    """Layer and RMS norm are torch's, forward and backward."""
    x, gain, offset = randn(2, 3, 9), randn(9, seed=1), randn(9, seed=2)
    assert_same(
        lambda x, g, b: reference.layer_norm(x, g, b, 1e-5),
        lambda x, g, b: functional.layer_norm(x, (9,), g, b, 1e-5),
        x, gain, offset,
    )  # fmt: skip
    assert_same(
        lambda x, g: reference.rms_norm(x, g, 1e-6),
        lambda x, g: functional.rms_norm(x, (9,), g, 1e-6),
        x, gain,
    )  # fmt: skip


def test_activations_as_torchs():
    """GELU is the tanh form; SwiGLU gates with the first half."""
    assert_same(
        reference.bias_gelu,
        lambda x, b: functional.gelu(x + b, approximate="tanh"),
        randn(2, 3, 8) * 3, randn(8, seed=1),
    )  # fmt: skip
    assert_same(
        reference.swiglu,
        lambda x: functional.silu(x[..., :4]) * x[..., 4:],
        randn(2, 3, 8),
    )  # fmt: skip


def test_bias_dropout_add():
    """Without dropout it is a sum; in training the kept values are scaled up."""
    x, bias, residual = randn(2, 3, 400), randn(400, seed=1), randn(2, 3, 400, seed=2)
    close(
        reference.bias_dropout_add(x, bias, residual, dropout=0.9, training=False),
        residual + x + bias,
    )
    close(reference.bias_dropout_add(x, None, residual, dropout=0.0, training=True), residual + x)
    out = reference.bias_dropout_add(x, bias, residual, dropout=0.25, training=True) - residual
    kept = out != 0
    assert 0.7 < kept.double().mean() < 0.8
    close(out[kept], ((x + bias) / 0.75)[kept])


def test_scaled_masked_softmax_by_hand():
    """exp(scale * x) over its sum, hidden entries and hidden rows zero."""
    x = torch.tensor([[[[0.0, math.log(3.0), 5.0], [1.0, 1.0, 1.0]]]], dtype=torch.float64)
    mask = torch.tensor([[False, False, True], [True, True, True]])
    wanted = torch.tensor([[[[0.1, 0.9, 0.0], [0.0, 0.0, 0.0]]]], dtype=torch.float64)
    close(reference.scaled_masked_softmax(x, mask, 2.0), wanted)


def test_rotary_embedding_turns_pairs_of_complex_numbers():
    """Channels i and i + R are the parts of a complex number that is turned by the angle."""
    x, angles = randn(2, 3, 5, 10), randn(5, 4, seed=1)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.exp(1j * angles)
    wanted = torch.cat([turned.real, turned.imag, x[..., 8:]], dim=-1)
    close(reference.rotary_embedding(x, angles.cos(), angles.sin()), wanted)


def test_cross_entropies_as_torchs():
    """Each token's loss is torch's; the linear one is their weighted sum."""
    target = torch.tensor([0, 3, 6, 2])
    assert_same(
        lambda logits: reference.cross_entropy(logits, target),
        lambda logits: functional.cross_entropy(logits, target, reduction="none"),
        randn(4, 7) * 5,
    )
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    assert_same(
        lambda h, w: reference.linear_cross_entropy(h, w, target, weights),
        lambda h, w: functional.cross_entropy(h @ w.T, target, reduction="none") @ weights,
        randn(4, 3), randn(7, 3, seed=1),
    )  # fmt: skip


def test_cross_entropy_of_huge_logits_is_finite():
    """No exponent overflows."""
    found = reference.cross_entropy(torch.tensor([[1e4, 0.0], [0.0, 1e4]]), torch.tensor([0, 0]))
    assert found.tolist() == [0.0, 1e4]


def test_adamw_as_torchs_optimizer():
    """Five steps equal torch.optim.AdamW in weights and moments."""
    params = [randn(3, 4), randn(5, seed=1)]
    state = [[tensor.clone() for tensor in params], None,
             [torch.zeros_like(one) for one in params], [torch.zeros_like(one) for one in params],
             [torch.zeros(()) for _ in params]]  # fmt: skip
    twins = [tensor.clone().requires_grad_() for tensor in params]
    optimizer = torch.optim.AdamW(twins, 0.02, (0.9, 0.95), 1e-6, 0.1, foreach=False)
    for step in range(5):
        grads = [randn(*one.shape, seed=10 + step) for one in params]
        state[1] = grads
        reference.adamw(*state, lr=0.02, beta1=0.9, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        optimizer.step()
    for place, twin in enumerate(twins):
        close(state[0][place], twin.detach())
        close(state[2][place], optimizer.state[twin]["exp_avg"])
        close(state[3][place], optimizer.state[twin]["exp_avg_sq"])
        assert state[4][place].item() == 5


def test_adamw_first_step_by_hand():
    """Decay first, then a step of lr against the sign of the gradient."""
    param = torch.tensor([2.0, -1.0], dtype=torch.float64)
    zeros = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    grad = torch.tensor([0.5, -3.0], dtype=torch.float64)
    reference.adamw(
        [param], [grad], zeros[:1], zeros[1:], [torch.zeros(())],
        lr=0.1, beta1=0.9, beta2=0.99, epsilon=0.0, weight_decay=0.5,
    )  # fmt: skip
    close(param, torch.tensor([2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1], dtype=torch.float64))


def test_grad_norm_by_hand():
    """3, 4 and 12 make 13; nothing makes 0."""
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]], dtype=torch.bfloat16)]
    assert reference.grad_norm(grads).item() == 13.0
    assert reference.grad_norm([]).item() == 0.0


def test_half_precision_is_computed_wide():
    """A sum that bfloat16 cannot hold is right in the reference."""
    x = torch.full((1, 1, 300), 1.0).bfloat16()
    x[..., 0] = 257.0
    wanted = reference.layer_norm(x.double(), torch.ones(300), torch.zeros(300), 1e-5)
    found = reference.layer_norm(x, torch.ones(300), torch.zeros(300), 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted.double(), rtol=4e-3, atol=1e-3)
