"""ICT's models: their table, their loss beside numpy in float64, accuracies and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmcore.families.bert.family import encoder_rows
from lmcore.families.ict.family import ICT
from lmcore.families.ict.model import Biencoder
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import family_of, parameter_shapes
from lmcore.model.shape import ModelShape

OWN = {
    "bert_post_norm": False,
    "bert_gelu": "tanh",
    "bert_token_types": 2,
    "biencoder_projection_dim": 0,
    "biencoder_shared_query_context_model": False,
    "retriever_score_scaling": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "two": {},
    "projected": {"biencoder_projection_dim": 7, "retriever_score_scaling": True},
    "shared": {"biencoder_shared_query_context_model": True},
    "original": {"bert_post_norm": True, "bert_gelu": "erf", "biencoder_projection_dim": 5},
}


def shape_of(**own: Any) -> ModelShape:
    return ModelShape(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        ffn_hidden_size=40,
        max_position_embeddings=12,
        padded_vocab_size=32,
        init_method_std=0.3,
        model_family="ict",
        further=tuple(sorted((OWN | own).items())),
    )


def model_of(ops: OpBinding, **own: Any) -> Biencoder:
    model = Biencoder(shape_of(**own), ops)
    model.initialize(3)
    return model


@pytest.fixture
def batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 32, (2, 8, 10), generator=drawn)
    lengths = torch.randint(3, 11, (2, 8, 1), generator=drawn)
    padding = torch.arange(10) >= lengths
    return {
        "query_BS": tokens[0].masked_fill(padding[0], 0),
        "query_padding_BS": padding[0],
        "block_BS": tokens[1].masked_fill(padding[1], 0),
        "block_padding_BS": padding[1],
        "query_weight_B": torch.tensor([1.0, 0.5, 1, 1, 0, 1, 2, 1]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_table(ops: OpBinding, kind: str) -> None:
    """It has the module's parameters, in the module's order; the body has BERT's names."""
    model, shape = model_of(ops, **KINDS[kind]), shape_of(**KINDS[kind])
    found = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert found == parameter_shapes(shape)
    assert family_of(shape) is ICT
    assert ICT.pretrained is not None
    names = {ICT.pretrained.name(name) for name in found}
    assert names - {""} == {row.name for row in encoder_rows(shape)}
    assert ("" in names) == bool(shape.own["biencoder_projection_dim"])


def vectors(model: Biencoder, batch: dict[str, Tensor]) -> tuple[Any, Any]:
    with torch.no_grad():
        query = model.query_vectors(batch["query_BS"], batch["query_padding_BS"])
        block = model.block_vectors(batch["block_BS"], batch["block_padding_BS"])
    return query.double().numpy(), block.double().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_loss(ops: OpBinding, kind: str, batch: dict[str, Tensor]) -> None:
    """It is the cross entropy of each question over all blocks, computed here in float64."""
    model = model_of(ops, **KINDS[kind])
    query, block = vectors(model, batch)
    scores = query @ block.T * (24**-0.5 if kind == "projected" else 1.0)
    each = np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1))
    each += scores.max(1) - np.diag(scores)
    weight = batch["query_weight_B"].double().numpy()
    assert float(model.loss(**batch).detach()) == pytest.approx((each * weight).sum(), rel=1e-5)
    model.eval()
    loss, *right = model.loss(**batch).tolist()
    assert loss == pytest.approx((each * weight).sum(), rel=1e-5)
    places = (scores >= np.diag(scores)[:, None]).sum(1)
    wanted = [(weight * (places <= top)).sum() for top in (1, 5, 20, 100)]
    assert right == pytest.approx(wanted)
    assert wanted[0] < wanted[1] < wanted[2] == wanted[3] == weight.sum()
    assert [one.accuracy_key for one in ICT.accuracies] == [
        "retrieval_accuracy",
        "retrieval_top5_accuracy",
        "retrieval_top20_accuracy",
        "retrieval_top100_accuracy",
    ]


def test_equal_blocks_are_no_find(ops: OpBinding, batch: dict[str, Tensor]) -> None:
    """A model that gives all texts one vector finds nothing."""
    model = model_of(ops).eval()
    for name in ("block_BS", "block_padding_BS"):
        batch[name] = batch[name][:1].expand_as(batch[name]).contiguous()
    assert model.loss(**batch).tolist()[1:3] == [0.0, 0.0]


def test_blocks_of_other_ranks(ops: OpBinding, batch: dict[str, Tensor]) -> None:
    """The halves of a batch, each with the blocks of both, have the loss of the whole batch."""
    model = model_of(ops)
    whole, (_, block) = model.loss(**batch), vectors(model, batch)
    found = []
    for first in (0, 4):
        half = {name: one[first : first + 4] for name, one in batch.items()}
        model.gather_samples = lambda x, first=first: (  # type: ignore[method-assign, misc]
            torch.from_numpy(block).to(x.dtype),
            first,
        )
        found.append(model.loss(**half))
    assert float(sum(found).detach()) == pytest.approx(float(whole.detach()), rel=1e-6)


def test_padding_does_not_count(ops: OpBinding, batch: dict[str, Tensor]) -> None:
    """Tokens at padding change no vector; a token before it changes its own text's alone."""
    model = model_of(ops, biencoder_projection_dim=6)
    before, _ = vectors(model, batch)
    changed = batch["query_BS"].masked_fill(batch["query_padding_BS"], 9)
    same, _ = vectors(model, batch | {"query_BS": changed})
    np.testing.assert_array_equal(same, before)
    changed = batch["query_BS"].clone()
    changed[2, 1] += 1 if changed[2, 1] < 31 else -1
    other, _ = vectors(model, batch | {"query_BS": changed})
    assert (other != before).any(axis=1).tolist() == [i == 2 for i in range(8)]
