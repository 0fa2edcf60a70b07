"""Initial weights, causality, dropout, recomputation and cache of a model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

MakeModel = Callable[..., GPT]

TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
TARGETS = TOKENS.roll(-1, dims=1)
ONES = torch.ones(TOKENS.shape)


def gradients(model: GPT) -> dict[str, Tensor]:
    """Return the gradients of the loss on TOKENS, by parameter."""
    model.zero_grad()
    model.loss(TOKENS, TARGETS, ONES).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class TestInitialize:
    """`GPT.initialize`."""

    SHAPE = ModelShape(3, 96, 4, 384, 64, 512, init_method_std=0.05)

    def test_statistics(self, ops: OpBinding) -> None:
        """Weights have mean 0 and sigma, sigma / sqrt(2 l) where they write to the residual."""
        model = GPT(self.SHAPE, ops)
        model.initialize(7)
        narrow = 0
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                continue
            residual = "attention.output" in name or "feed_forward.down" in name
            narrow += residual
            sigma = 0.05 / math.sqrt(6) if residual else 0.05
            count = parameter.numel()
            # Five standard errors of the mean and of the standard deviation.
            assert abs(parameter.mean().item()) < 5 * sigma / math.sqrt(count), name
            assert abs(parameter.std().item() / sigma - 1) < 5 / math.sqrt(2 * count), name
            assert parameter.abs().max().item() > 3 * sigma, name
        assert narrow == 2 * self.SHAPE.num_layers

    def test_gains_and_offsets(self, ops: OpBinding) -> None:
        """Gains of the norms are 1; every bias and offset is 0."""
        model = GPT(self.SHAPE, ops)
        model.initialize(7)
        vectors = {n: p for n, p in model.named_parameters() if p.ndim == 1}
        gains = {name for name in vectors if name.endswith("norm.weight")}
        assert len(gains) == 2 * self.SHAPE.num_layers + 1
        for name, parameter in vectors.items():
            assert parameter.eq(1.0 if name in gains else 0.0).all(), name

    def test_seed_decides(self, ops: OpBinding) -> None:
        """A seed gives the same weights for any global random state, another seed other weights."""
        models = []
        for seed, state in ((7, 0), (7, 1), (8, 0)):
            torch.default_generator.manual_seed(state)
            model = GPT(self.SHAPE, ops)
            model.initialize(seed)
            models.append(dict(model.named_parameters()))
        for name, parameter in models[0].items():
            assert parameter.equal(models[1][name]), name
        assert not models[0]["token_embedding.weight"].equal(models[2]["token_embedding.weight"])

    def test_first_loss(self, ops: OpBinding) -> None:
        """A fresh model of small weights knows nothing: its loss is about log of the vocabulary."""
        model = GPT(ModelShape(3, 96, 4, 384, 64, 512), ops)
        model.initialize(7)
        tokens = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
        loss = model.loss(tokens, tokens.roll(-1, 1), torch.ones(4, 64)) / 256
        assert loss.item() == pytest.approx(math.log(512), abs=0.1)


def test_future_does_not_change_the_past(make_model: MakeModel) -> None:
    """Changing token t leaves every position before t as it was, and changes t."""
    model = make_model().eval()
    for at in range(TOKENS.shape[1]):
        changed = TOKENS.clone()
        changed[:, at] = (changed[:, at] + 1) % 32
        with torch.no_grad():
            before, after = model(TOKENS), model(changed)
        assert torch.allclose(before[:, :at], after[:, :at], rtol=0, atol=1e-6)
        assert not torch.allclose(before[:, at], after[:, at], atol=1e-3)


def test_rows_do_not_meet(make_model: MakeModel) -> None:
    """A row of a batch has the hidden states that it has alone."""
    model = make_model().eval()
    with torch.no_grad():
        together = model(TOKENS)
        alone = torch.cat([model(TOKENS[:1]), model(TOKENS[1:])])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_weightless_tokens_do_not_count(make_model: MakeModel) -> None:
    """A target of weight 0 changes neither the loss nor a gradient."""
    model = make_model()
    weight = ONES.clone()
    weight[:, 2] = 0.0
    other = TARGETS.clone()
    other[:, 2] = 11
    found = []
    for targets in (TARGETS, other):
        model.zero_grad()
        loss = model.loss(TOKENS, targets, weight)
        loss.backward()
        found.append((loss.item(), model.token_embedding.weight.grad.clone()))
    assert found[0][0] == found[1][0]
    assert found[0][1].equal(found[1][1])


def test_head_is_tied(make_model: MakeModel) -> None:
    """The embedding of a token that is never an input gets its gradient from the head alone."""
    model = make_model()
    absent = sorted(set(range(32)) - set(TOKENS.flatten().tolist()))
    grad = gradients(model)["token_embedding.weight"]
    assert absent
    assert (grad[absent].norm(dim=1) > 0).all()


@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_dropout_only_in_training(make_model: MakeModel, kind: str) -> None:
    """Dropout makes two training passes differ and leaves evaluation as without it."""
    model, plain = make_model(**{kind: 0.5}), make_model()
    with torch.no_grad():
        model.train()
        assert not model(TOKENS).equal(model(TOKENS))
        torch.testing.assert_close(model.eval()(TOKENS), plain.eval()(TOKENS))


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [4, 1, 1, 1], [1, 6], [3, 2, 2]])
def test_cache_equals_recomputation(make_model: MakeModel, sizes: list[int]) -> None:
    """Tokens given in pieces with a cache have the hidden states that they have at once."""
    model = make_model().eval()
    with torch.no_grad():
        expected = model(TOKENS)
        cache = model.new_cache(torch.float32)
        cache.reserve(2, 7)
        pieces, start = [], 0
        for size in sizes:
            new = TOKENS[:, start : start + size]
            if size == 1:
                pieces.append(model(new, cache.next_tokens([start] * 2)))
            else:
                rows = [model(new[n : n + 1], cache.further_tokens(n, start, size)) for n in (0, 1)]
                pieces.append(torch.cat(rows))
            start += size
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_compiled_blocks_serve_no_cache(make_model: MakeModel) -> None:
    """With a cache, whose lengths change with every token, blocks are called as they are."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a block is compiled")

    model = make_model().eval()
    cache = model.new_cache(torch.float32)
    cache.reserve(2, 7)
    with torch.no_grad():
        expected = model(TOKENS)
        for block in model.layers:
            block._compiled_call_impl = refuse  # what `compile` sets
        with pytest.raises(AssertionError, match="is compiled"):
            model(TOKENS)
        found = model(TOKENS, cache.first_tokens([0, 1], 7))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_parameters_that_decay(make_model: MakeModel) -> None:
    """Matrices are embeddings and projections; every other parameter is a vector."""
    model = make_model()
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
    vectors = {name for name, p in model.named_parameters() if p.ndim == 1}
    assert all(name.endswith("weight") and "norm" not in name for name in matrices)
    assert all("norm" in name or name.endswith("bias") for name in vectors)
    assert len(matrices) == 2 + 4 * 2
    assert len(matrices | vectors) == len(list(model.parameters()))
