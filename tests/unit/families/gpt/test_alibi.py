"""ALiBi: its slopes, caches, parts of the heads, compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lmcore.base.errors import ConfigError
from lmcore.contract import OP_SPECS, OpImpl, OpTable
from lmcore.contract.op import torch_kernels
from lmcore.families.build import create_model
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.attention_bias import Alibi, alibi_attention, alibi_slopes
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore.parallel.tensor_parallel import connect

MakeModel = Callable[..., GPT]
BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True}


@pytest.mark.parametrize(
    "heads, exponents",
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes(heads: int, exponents: list[float]) -> None:
    """Slopes are 2^-8/n, 2^-16/n ...; beyond a power of two, every second one of the next."""
    expected = torch.tensor([2.0**-one for one in exponents], dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(heads, torch.float64), expected, rtol=1e-15, atol=0)


def test_later_keys_and_masks_are_hidden() -> None:
    """The last queries of a sequence see the keys up to their own that no mask hides."""
    slope_N = torch.tensor([1.0, 0.25])
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    mask[..., 1, 0] = True
    hidden = -torch.inf
    found = Alibi(slope_N).addend(2, 3, torch.float32, causal=True, mask=mask)
    expected = [[[-1, 0, hidden], [hidden, -1, 0]], [[-0.25, 0, hidden], [hidden, -0.25, 0]]]
    assert found.tolist() == [expected]


def test_near_keys_are_exact_in_bfloat16() -> None:
    """After 5,000 tokens the bias of the last ones is the same as after few."""
    q, k, v = (torch.randn(1, 2, 5000, 4).bfloat16() for _ in range(3))
    slope_N = alibi_slopes(2)
    near = Alibi(slope_N).addend(1, 4, torch.bfloat16, causal=True, mask=None)
    far = Alibi(slope_N).addend(1, 5000, torch.bfloat16, causal=True, mask=None)
    torch.testing.assert_close(far[..., -4:], near, rtol=0, atol=0)
    op = torch_kernels.attention
    found = alibi_attention(q[:, :, -1:], k, v, op=op, alibi=Alibi(slope_N), causal=True)
    assert found.isfinite().all()


def test_the_kernel_is_chosen_and_strict(make_model: MakeModel) -> None:
    """Layers get a kernel of the op that adds a bias; `--strict-ops` refuses the reference."""

    def kernel(name: str, *traits: str) -> OpImpl:
        target = "lmcore.contract.op.torch_kernels:attention"
        return OpImpl("attention", name, target, traits=frozenset(traits), plugin="chip")

    shape = make_model(**BLOOM).shape
    impls = [kernel("fast"), kernel("sdpa", "score_bias")]
    table = OpTable(OP_SPECS, impls, device_plugin="chip")
    create_model(shape, OpBinding(table, "cpu", "float32"))
    (found,) = [one for one in table.resolutions if one.op == "attention"]
    assert found.chosen == "sdpa"
    assert found.context.attributes["score_bias"] is True
    reasons = dict(found.rejected)
    assert reasons["fast"] == (
        "adds no bias to the scores: it does not claim the trait `score_bias`"
    )
    others = [one for one in OP_SPECS if one.name == "attention"]
    strict = OpTable(others, impls[:1], strict=True)
    with pytest.raises(ConfigError, match="op `attention` has no kernel for this case") as error:
        strict.bind("attention", found.context)
    assert "`fast`: adds no bias to the scores" in str(error.value.why)


def test_other_models_have_no_bias(make_model: MakeModel) -> None:
    """Their cases are as before, so that every kernel of the op may be chosen."""
    table = OpTable(OP_SPECS)
    create_model(make_model().shape, OpBinding(table, "cpu", "float32"))
    (found,) = [one for one in table.resolutions if one.op == "attention"]
    assert "score_bias" not in found.context.attributes


@pytest.fixture
def model(make_model: MakeModel) -> GPT:
    """A small model with a number of heads that is no power of two."""
    return make_model(masked=True, **BLOOM).eval()


def whole(model: GPT, *sequences: list[int]) -> list[Tensor]:
    """Return the last hidden state of each sequence, computed alone."""
    with torch.no_grad():
        return [model(torch.tensor([one]))[0, -1] for one in sequences]


def test_sequences_of_different_lengths(model: GPT) -> None:
    """One token each of sequences of different lengths is as in a pass over each of them."""
    first, second = [3, 17, 4, 4, 29, 0], [31, 1, 2]
    cache = model.new_cache(torch.float32)
    cache.reserve(2, 8)
    with torch.no_grad():
        model(torch.tensor([first, [*second, 0, 0, 0]]), cache.first_tokens([0, 1], 6))
        found = model(torch.tensor([[7], [9]]), cache.next_tokens([6, 3]))[:, 0]
    expected = torch.stack(whole(model, [*first, 7], [*second, 9]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [[31, 1, 2], [31, 1, 2, 8, 8, 9]])
def test_continuations(model: GPT, other: list[int]) -> None:
    """Continuations of sequences have the distances to them that they have in one pass."""
    first = [3, 17, 4, 4, 29, 0]
    padded = other + [0] * (6 - len(other))
    cache = model.new_cache(torch.float32)
    cache.reserve(2, 8)
    ways = [(0, [7, 5]), (1, [9, 2]), (1, [4, 4])]
    with torch.no_grad():
        model(torch.tensor([first, padded]), cache.first_tokens([0, 1], 6))
        lengths = [(6, len(other))[slot] for slot, _ in ways]
        view = cache.branches([slot for slot, _ in ways], lengths, 2)
        found = model(torch.tensor([tokens for _, tokens in ways]), view)[:, -1]
    expected = torch.stack(whole(model, *((first, other)[slot] + new for slot, new in ways)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_next_token_kernels_are_not_used(model: GPT) -> None:
    """A device's kernel for new tokens, which adds no bias, is left out."""
    assert not any(one.standard for one in model.attentions)


def test_ranks_have_the_slopes_of_their_heads() -> None:
    """In tensor parallelism each rank's bias is a part of the whole model's."""
    shape = replace(ModelShape(1, 24, 6, 40, 12, 32), **BLOOM)
    x_BSH = torch.zeros(1, 5, 24)

    def bias(model: GPT) -> Tensor:
        alibi = model.alibi(x_BSH)
        assert alibi is not None
        return alibi.addend(5, 5, torch.float32, causal=True, mask=None)

    def make(shape: ModelShape) -> GPT:
        with torch.device("meta"):
            return GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))

    parts = []
    for rank in range(3):
        part = make(shape.narrowed(3))
        connect(part, SimpleNamespace(rank=rank, size=3), sequence=False, rng=None)
        parts.append(bias(part))
    torch.testing.assert_close(torch.cat(parts, dim=1), bias(make(shape)), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_compiled_layers(make_model: MakeModel) -> None:
    """A compiled layer computes the same, for a second length too."""
    plain = make_model(**BLOOM)
    tokens = torch.arange(8)[None]
    expected = [plain.loss(tokens[:, :end], tokens[:, :end]) for end in (8, 6)]
    for layer in plain.layers:
        layer.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    found = [plain.loss(tokens[:, :end], tokens[:, :end]) for end in (8, 6)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
