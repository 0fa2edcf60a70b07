"""Vocabulary-parallel loss and embedding; several ranks are in `tests/distributed`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional

from lmcore.parallel import tensor_parallel as vocabulary
from lmcore.parallel.mesh import Axis
from lmcore.parallel.tensor_parallel import VocabularyLoss, embed_split

TOKENS, HIDDEN, VOCABULARY = 11, 6, 9


@pytest.fixture
def axis() -> Iterator[Axis]:
    """Axis of one rank, with a process group."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Axis(0, 1, (0,), distributed.group.WORLD)
    distributed.destroy_process_group()


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, rows, targets and weights of the loss, some of them 0."""
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(TOKENS, dtype=torch.float64)
    weights[2] = 0.0
    return hidden, rows, torch.randint(VOCABULARY, (TOKENS,)), weights


@pytest.mark.parametrize("block", [1, 4, TOKENS, 100])
def test_loss_and_gradients(axis, tensors, block, monkeypatch) -> None:
    """Loss and gradients are torch's in float64, for any size of a block."""
    monkeypatch.setattr(vocabulary, "_BLOCK_BYTES", 4 * VOCABULARY * block)
    hidden, rows, target, weights = tensors
    losses = functional.cross_entropy(hidden @ rows.t(), target, reduction="none")
    right = (losses * weights).sum() * 3.0
    wanted = torch.autograd.grad(right, (hidden, rows))
    found = VocabularyLoss(axis, 0, gathered=False)(hidden, rows, target, weights) * 3.0
    assert found.item() == pytest.approx(right.item(), rel=1e-14)
    for one, other in zip(torch.autograd.grad(found, (hidden, rows)), wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-13, rtol=0)


@pytest.mark.parametrize("own", [1, VOCABULARY - 2, VOCABULARY])
def test_rows_of_padding(axis, tensors, own) -> None:
    """They change neither the loss nor the best row, with a bias too; their gradient is zero."""
    hidden, rows, target, weights = tensors
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    target = target % own
    logits = (hidden @ rows.t() + bias)[:, :own]
    losses = functional.cross_entropy(logits, target, reduction="none")
    right = (losses * weights).sum()
    head = VocabularyLoss(axis, own, gathered=False)
    found = head(hidden, rows, target, weights, bias)
    assert found.item() == pytest.approx(right.item(), rel=1e-12, abs=1e-12)
    inputs = (hidden, rows, bias)
    wanted = torch.autograd.grad(right, inputs)
    for one, other in zip(torch.autograd.grad(found, inputs), wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)
    assert torch.equal(head.best(hidden.detach(), rows.detach(), bias.detach()), logits.argmax(-1))


def test_large_logits(axis) -> None:
    """Scores of thousands neither overflow nor lose the loss."""
    hidden, rows = torch.tensor([[1.0]]), torch.tensor([[5000.0], [4999.0]], requires_grad=True)
    loss = VocabularyLoss(axis, 0, gathered=False)(hidden, rows, torch.tensor([1]), torch.ones(1))
    assert loss.item() == pytest.approx(1.3132617, rel=1e-6)
    loss.backward()
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == pytest.approx([0.7310586, -0.7310586], rel=1e-6)


def test_no_gradient_is_computed_for_nobody(axis, tensors, monkeypatch) -> None:
    """Without gradients, only the loss is computed."""
    asked = []
    real = vocabulary._cross_entropy
    monkeypatch.setattr(
        vocabulary,
        "_cross_entropy",
        lambda *args, gradient: asked.append(gradient) or real(*args, gradient=gradient),
    )
    hidden, rows, target, weights = (one.detach() for one in tensors)
    loss = VocabularyLoss(axis, 0, gathered=False)(hidden, rows, target, weights)
    assert asked == [False]
    assert not loss.requires_grad


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_of_others_are_zero(axis, rank) -> None:
    """A process gives its own rows, and zeros for tokens that another one has."""
    whole = torch.arange(18.0).view(9, 2) + 1
    own = whole[3 * rank : 3 * rank + 3]
    tokens = torch.tensor([[0, 3, 8, 5, 2]])
    place = Axis(rank, 3, (0, 1, 2), axis.group)
    found = embed_split(tokens, own, place)
    here = (tokens // 3 == rank).unsqueeze(-1)
    assert torch.equal(found, torch.where(here, whole[tokens], 0.0))
