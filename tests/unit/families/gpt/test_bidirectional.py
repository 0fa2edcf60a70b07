"""Attention that is not causal, against the float64 reference of its op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmcore.contract import OP_SPECS, OpTable
from lmcore.contract.op import reference
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
    init_method_std=0.3,
)
LLAMA = ModelShape(
    **{
        **vars(SHAPE),
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    }
)
TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
WEIGHTS = torch.ones(TOKENS.shape)


class Bidirectional(GPT):
    """Model of the same layers, in which every token attends to all others."""

    causal = False


def models(shape: ModelShape, *, masked: bool = False) -> tuple[Bidirectional, Bidirectional]:
    """Return a model on the CPU's kernels, and one on the references in float64."""
    kernels = pytest.importorskip("lmcore_cpu.kernels").KERNELS
    fast = Bidirectional(
        shape, OpBinding(OpTable(OP_SPECS, kernels), "cpu", "float32"), masked=masked
    )
    exact = Bidirectional(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float64"), masked=masked)
    for model in (fast, exact.double()):
        model.initialize(7)
    return fast, exact


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradients(shape: ModelShape, masked: bool) -> None:
    """Loss and gradients equal float64's, with and without a document-boundary mask."""
    fast, exact = models(shape, masked=masked)
    options = {"documents_BS": DOCUMENTS} if masked else {}
    losses = [
        model.loss(TOKENS, TOKENS.roll(1, dims=1), WEIGHTS.to(model.head_weight.dtype), **options)
        for model in (fast, exact)
    ]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    wanted = dict(exact.named_parameters())
    for name, parameter in fast.named_parameters():
        assert parameter.grad is not None
        grad = wanted[name].grad
        assert grad is not None
        scale = float(grad.abs().max())
        torch.testing.assert_close(parameter.grad.double(), grad, rtol=0, atol=2e-5 * scale)


def test_attention_is_the_reference() -> None:
    """The module's output is the reference's for `causal` False, which differs from causal."""
    _, exact = models(SHAPE)
    attention = exact.layers[0].attention
    x_BSH = torch.randn(2, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def by_definition(causal: bool) -> Tensor:
        parts = attention.qkv(x_BSH).unflatten(-1, (12, 6)).split(4, dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = reference.attention(q, k, v, causal=causal)
        return attention.output(out.transpose(1, 2).flatten(2))

    found = attention(x_BSH)
    torch.testing.assert_close(found, by_definition(causal=False), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, by_definition(causal=True), atol=1e-3)


def test_later_tokens_are_seen() -> None:
    """A change of the last token changes the hidden states of the first."""
    _, exact = models(SHAPE)
    exact.eval()
    other = TOKENS.clone()
    other[:, -1] = 11
    with torch.no_grad():
        assert not torch.allclose(exact(TOKENS)[:, 0], exact(other)[:, 0], atol=1e-3)


def test_no_cache() -> None:
    """A key-value cache is refused: earlier tokens would have to see later ones."""
    _, exact = models(SHAPE)
    cache = exact.new_cache(torch.float64)
    cache.reserve(2, 12)
    with pytest.raises(AssertionError, match="causal"):
        exact(TOKENS, cache.first_tokens([0, 1], TOKENS.shape[1]))
