"""Retro: its table, its logits and gradients beside a naive pass in float64, what is not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.validate import validate
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.families.retro.block import Readers
from lmcore.families.retro.family import RETRO, forward_flops, reading_layers
from lmcore.families.retro.model import Retro
from lmcore.model.family import family_of, parameter_shapes

from .conftest import CHUNK, KINDS, LLAMA, shape_of
from .naive import NaiveRetro

FP64 = OpBinding(OpTable(OP_SPECS), "cpu", "float64")


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_the_modules(kind: str, ops: OpBinding) -> None:
    """Names and shapes of the table are the modules' own."""
    shape = shape_of(**KINDS[kind])
    with torch.device("meta"):
        model = Retro(shape, ops)
    found = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert found == parameter_shapes(shape)
    assert family_of(shape) is RETRO


@pytest.mark.parametrize(
    "layers, first, numbers",
    [
        (12, 0, [6, 9, 12]),
        (15, 0, [6, 9, 12, 15]),
        (24, 0, [9, 12, 15, 18, 21, 24]),
        (16, 0, [9, 12, 15]),
        (4, 0, [4]),
        (8, 3, [3, 6]),
    ],
)
def test_reading_layers(layers: int, first: int, numbers: list[int]) -> None:
    """They are Megatron's; in a model of fewer layers than its first one, the last."""
    shape = shape_of(num_layers=layers, retro_first_layer=first)
    assert [one + 1 for one in reading_layers(shape)] == numbers


@pytest.fixture
def exact(make_retro: Callable[..., Retro]) -> Callable[..., Retro]:
    """Makes a model in float64, by the ops' references."""

    def make(**values: Any) -> Retro:
        model = Retro(shape_of(**values), FP64).double()
        model.load_state_dict(make_retro(**values).state_dict())
        return model.eval()

    return make


def logits(model: Retro, batch: dict[str, Tensor], **changed: Tensor) -> Tensor:
    given = {name: one for name, one in batch.items() if name.startswith("neighbor")}
    tokens = changed.pop("tokens_BS", batch["tokens_BS"])
    return model.logits(model(tokens, **given | changed))


def test_naive(exact: Callable[..., Retro], batch: dict[str, Tensor]) -> None:
    """Logits, loss and every gradient are as in a loop over tokens in float64."""
    model = exact(retro_attention_gate=0.5)
    weights = {
        name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()
    }
    naive = NaiveRetro(model, weights)
    rows = zip(
        *(batch[name] for name in ("tokens_BS", "neighbors_BLKR", "neighbor_padding_BLKR")),
        strict=True,
    )
    expected = torch.stack([naive.logits(*row) for row in rows])
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-10, atol=1e-10)
    loss = functional.cross_entropy(
        expected.flatten(0, 1), batch["targets_BS"].flatten(), reduction="sum"
    )
    own = model.loss(**batch)
    torch.testing.assert_close(own, loss, rtol=1e-6, atol=0.0, check_dtype=False)
    own.backward()
    loss.backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, weights[name].grad, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels(
    kind: str,
    make_retro: Callable[..., Retro],
    exact: Callable[..., Retro],
    batch: dict[str, Tensor],
) -> None:
    """In float32, on every kernel, the loss is the float64 one; each parameter has a gradient."""
    model = make_retro(**KINDS[kind])
    loss = model.loss(**batch)
    assert float(loss.detach()) == pytest.approx(
        float(exact(**KINDS[kind]).loss(**batch).detach()), rel=1e-5
    )
    loss.backward()
    assert [name for name, one in model.named_parameters() if not one.grad.abs().any()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_causality(kind: str, exact: Callable[..., Retro], batch: dict[str, Tensor]) -> None:
    """Later tokens, and neighbours of chunks that are not complete, change nothing before."""
    model = exact(**KINDS[kind])
    before = logits(model, batch)
    for position in range(batch["tokens_BS"].shape[1]):
        tokens = batch["tokens_BS"].clone()
        tokens[:, position] = (tokens[:, position] + 1) % 32
        after = logits(model, batch, tokens_BS=tokens)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])
    for chunk in range(2):
        neighbors = batch["neighbors_BLKR"].clone()
        neighbors[:, chunk] = (neighbors[:, chunk] + 1) % 32
        after = logits(model, batch, neighbors_BLKR=neighbors)
        first = (chunk + 1) * CHUNK - 1
        assert torch.equal(after[:, :first], before[:, :first])
        assert not torch.isclose(after[:, first:], before[:, first:]).all(-1).any()


def test_a_chunk_reads_its_own_neighbours(
    exact: Callable[..., Retro], batch: dict[str, Tensor]
) -> None:
    """With one layer that reads, and no attention between tokens, others' neighbours are unseen."""
    model = exact(num_layers=2)
    with torch.no_grad():
        for block in model.decoder_blocks:
            block.attention.output.weight.zero_()
    before = logits(model, batch)
    neighbors = batch["neighbors_BLKR"].clone()
    neighbors[:, 0] = (neighbors[:, 0] + 1) % 32
    changed = (logits(model, batch, neighbors_BLKR=neighbors) != before).any(-1)
    assert changed.nonzero()[:, 1].unique().tolist() == [*range(CHUNK - 1, 2 * CHUNK - 1)]


def test_padding(exact: Callable[..., Retro], batch: dict[str, Tensor]) -> None:
    """Tokens at padding do not count; with padding alone, and a closed gate, it is GPT."""
    model = exact()
    before = logits(model, batch)
    padding = batch["neighbor_padding_BLKR"]
    other = batch["neighbors_BLKR"].masked_fill(padding, 9)
    assert torch.equal(logits(model, batch, neighbors_BLKR=other), before)
    without = logits(model, batch, neighbor_padding_BLKR=torch.ones_like(padding))
    assert not torch.equal(without, before)
    plain = GPT(model.shape, FP64).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    wanted = plain.logits(plain.eval()(batch["tokens_BS"]))
    torch.testing.assert_close(without, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.logits(model(batch["tokens_BS"])), wanted)
    closed = exact(retro_attention_gate=0.0)
    torch.testing.assert_close(logits(closed, batch), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", range(10))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 9])
def test_readers(start: int, count: int) -> None:
    """Tokens from any position are divided by the chunk that they read."""
    readers = Readers(start, count, CHUNK)
    x = torch.arange(start, start + count).view(1, -1, 1).double() + 100
    chunks = [(place + 1) // CHUNK - 1 for place in range(start, start + count)]
    assert readers.silent == sum(one < 0 for one in chunks)
    if not readers.groups:
        assert max(chunks) < 0
        return
    groups = readers.split(x)
    assert groups.shape == (readers.groups, CHUNK, 1)
    for number, group in enumerate(groups):
        wanted = [
            place + start + 100.0
            for place, chunk in enumerate(chunks)
            if chunk == readers.first + number
        ]
        assert [one for one in group.flatten().tolist() if one] == wanted
    silent = torch.zeros(1, readers.silent, 1, dtype=x.dtype)
    assert torch.equal(readers.join(groups), torch.cat([silent, x[:, readers.silent :]], 1))


def test_flops() -> None:
    """The operations are the ones that torch counts in a forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    for more in ({}, LLAMA):
        shape = shape_of(**more)
        model = Retro(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
        model.initialize(1)
        tokens = torch.zeros(1, 3 * CHUNK, dtype=torch.int64)
        neighbors = torch.zeros(1, 3, 2, 2 * CHUNK, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model.logits(model(tokens, neighbors_BLKR=neighbors))
        found = forward_flops(shape, 3 * CHUNK)
        assert counter.get_total_flops() == found.layers + found.rest


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--context-parallel-size 2", "`--context-parallel-size 2` is not supported by Retro"),
        ("--pipeline-model-parallel-size 2", "-parallel-size 2` is not supported by Retro models"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "`--sequence-parallel` is not supported by Retro models",
        ),
        ("--reset-attention-mask", "`--reset-attention-mask` is not supported by Retro models"),
        ("--seq-length 96", "`--seq-length 96` is not divisible by `retro_chunk_length"),
        ("--retro-num-retrieved-chunks 4", "a neighbour of 256 tokens exceeds the 128 learned"),
        ("--retro-first-layer 5", "`--retro-first-layer 5` exceeds"),
        ("--position-embedding-type relative", "-type relative` is not supported by Retro"),
    ],
)
def test_refused_settings(flags: str, message: str) -> None:
    """A setting that Retro does not have is an error that names it."""
    loaded = load_config(["--model-family", "retro", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(loaded, world_size=2)
    assert message in str(caught.value)
