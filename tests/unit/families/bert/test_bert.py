"""BERT: its table and its modules, counts, losses, accuracies, and settings that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.validate import validate
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.bert.family import BERT, forward_flops, parameters
from lmcore.families.bert.model import Bert
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import family_of, parameter_shapes
from lmcore.model.parameters import parameter_count
from lmcore.model.shape import ModelShape

from .conftest import OWN, shape_of

VARIANTS = [
    {},
    {"bert_binary_head": False},
    {"bert_post_norm": True, "bert_gelu": "erf"},
    {"bert_token_types": 0},
]


@pytest.mark.parametrize("own", VARIANTS)
def test_table_and_modules(own: Any) -> None:
    """The table has the names and shapes of the modules, in their order of layers."""
    ops = OpBinding(OpTable(OP_SPECS), "cpu", "float32")
    with torch.device("meta"):
        model = Bert(shape_of(**own), ops)
    modules = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameter_shapes(model.shape) == modules


@pytest.mark.parametrize(
    "sizes, binary, expected",
    [
        # Megatron's BERT-345M, with both heads.
        ((24, 1024, 16, 512, 30592), True, 336_297_858),
        # The same without the order head and its segments.
        ((24, 1024, 16, 512, 30592), False, 336_297_858 - 1_049_600 - 2_050),
    ],
)
def test_parameter_count(sizes: tuple[int, ...], binary: bool, expected: int) -> None:
    """Counts of published models."""
    layers, hidden, heads, positions, rows = sizes
    own = OWN | {"bert_binary_head": binary}
    shape = ModelShape(
        *(layers, hidden, heads, 4 * hidden, positions, rows),
        model_family="bert",
        further=tuple(sorted(own.items())),
    )
    assert parameter_count(parameters(shape)) == expected


def test_flops() -> None:
    """By hand: two layers, five tokens with one to predict, both heads."""
    shape = shape_of()
    block = 5 * (2 * 24 * (4 * 24 + 2 * 40) + 4 * 5 * 24)
    heads = 2 * 24 * (24 + 32) + 2 * 24 * (24 + 2)
    found = forward_flops(shape, 5)
    assert (found.layers, found.rest) == (2 * block, heads)


def test_losses_of_a_shape() -> None:
    """Without the order head there is one loss, and a micro-batch has no labels for it."""
    both, one = family_of(shape_of()), family_of(shape_of(bert_binary_head=False))
    assert [loss.key for loss in both.losses] == ["lm_loss", "sop_loss"]
    assert [loss.key for loss in one.losses] == ["lm_loss"]
    assert set(both.batch) - set(one.batch) == {"order_B", "order_weight_B"}
    assert family_of(load_config(["--model-family", "BERT"]).config.model) is BERT


def test_padding_is_not_seen(make_bert: Callable[..., Bert], batch: dict[str, Tensor]) -> None:
    """Neither padding nor tokens at positions without a target change a loss."""
    model = make_bert()
    before = model.loss(**batch)
    tokens = batch["tokens_BS"].clone()
    tokens[1, 6:] = 13
    targets = batch["targets_BM"].clone()
    targets[1, 1:] = 7
    after = model.loss(**batch | {"tokens_BS": tokens, "targets_BM": targets})
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("own", VARIANTS)
def test_accuracies(
    make_bert: Callable[..., Bert], batch: dict[str, Tensor], own: dict[str, Any]
) -> None:
    """In evaluation the weights of the predicted targets follow the losses."""
    model = make_bert(**own)
    if not model.shape.own["bert_binary_head"]:
        batch = {name: x for name, x in batch.items() if not name.startswith("order")}
    losses = torch.atleast_1d(model.loss(**batch))
    model.eval()
    with torch.no_grad():
        found = model.loss(**batch)
        inputs = [batch[name] for name in ("tokens_BS", "types_BS", "padding_BS")]
        hidden = model.hidden(*inputs)
        predicted = model.masked_logits(hidden, batch["chosen_BM"]).argmax(-1)
        wanted = [((predicted == batch["targets_BM"]) * batch["loss_weight_BM"]).sum()]
        if model.shape.own["bert_binary_head"]:
            order = model.order_logits(hidden).argmax(-1)
            wanted.append((order == batch["order_B"]).float().sum())
    torch.testing.assert_close(found[: len(losses)], losses)
    assert found[len(losses) :].tolist() == [float(one) for one in wanted]
    targets = batch["targets_BM"].clone()
    targets.copy_(predicted)
    right = model.loss(**batch | {"targets_BM": targets})
    assert right[len(losses)].item() == 4.0


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--context-parallel-size 2", "`--context-parallel-size 2` is not supported by BERT"),
        ("--position-embedding-type rope", "rope` is not supported by BERT models"),
        ("--untie-embeddings-and-output-weights", "output-weights` is not supported by BERT"),
        ("--reset-attention-mask", "`--reset-attention-mask` is not supported by BERT"),
        ("--eod-mask-loss", "`--eod-mask-loss` is not supported by BERT"),
        ("--seq-length 4", "`--seq-length 4` is too short for BERT"),
    ],
)
def test_refused_settings(flags: str, message: str) -> None:
    """Each is named with its reason."""
    loaded = load_config(["--model-family", "bert", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(loaded, world_size=2 if "parallel" in flags else 1)
    assert message in str(caught.value)
