"""The model against the BERT of `transformers`, where that package is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from suite.selection import peer
from torch import Tensor

from lmcore.families.bert.model import Bert

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

LAYER = r"bert\.encoder\.layer\.(\d+)\."
NAMES = {
    r"bert\.embeddings\.word_embeddings\.weight": "token_embedding.weight",
    r"bert\.embeddings\.position_embeddings\.weight": "position_embedding.weight",
    r"bert\.embeddings\.token_type_embeddings\.weight": "type_embedding.weight",
    r"bert\.embeddings\.LayerNorm\.(weight|bias)": r"embedding_norm.\1",
    LAYER + r"attention\.output\.dense\.weight": r"blocks.\1.attention.output.weight",
    LAYER + r"attention\.output\.dense\.bias": r"blocks.\1.attention.output_bias",
    LAYER + r"attention\.output\.LayerNorm\.(weight|bias)": r"blocks.\1.attention_norm.\2",
    LAYER + r"intermediate\.dense\.weight": r"blocks.\1.feed_forward.up.weight",
    LAYER + r"intermediate\.dense\.bias": r"blocks.\1.feed_forward.up_bias",
    LAYER + r"output\.dense\.weight": r"blocks.\1.feed_forward.down.weight",
    LAYER + r"output\.dense\.bias": r"blocks.\1.feed_forward.down_bias",
    LAYER + r"output\.LayerNorm\.(weight|bias)": r"blocks.\1.feed_forward_norm.\2",
    r"bert\.pooler\.dense\.(weight|bias)": r"pooler.\1",
    r"cls\.predictions\.transform\.dense\.(weight|bias)": r"masked_head.dense.\1",
    r"cls\.predictions\.transform\.LayerNorm\.(weight|bias)": r"masked_head.norm.\1",
    r"cls\.predictions\.bias": "masked_head.bias",
    r"cls\.seq_relationship\.(weight|bias)": r"order_head.\1",
}
QKV = re.compile(LAYER + r"attention\.self\.(query|key|value)\.(weight|bias)")


def rows(theirs: str, ours: dict[str, Tensor]) -> Tensor:
    """Return the part of our tensors that has the name of one of their parameters."""
    if match := QKV.fullmatch(theirs):
        layer, which, kind = match.groups()
        packed = ours[f"blocks.{layer}.attention.qkv.{kind}"]
        return packed.chunk(3)[("query", "key", "value").index(which)]
    for pattern, name in NAMES.items():
        if match := re.fullmatch(pattern, theirs):
            return ours[match.expand(name)]
    raise AssertionError(theirs)


@pytest.fixture
def pair(make_bert: Callable[..., Bert]) -> tuple[Bert, Any]:
    """Our model and theirs with the same weights."""
    transformers = peer("transformers")
    ours = make_bert(bert_post_norm=True, bert_gelu="erf")
    shape = ours.shape
    config = transformers.BertConfig(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.ffn_hidden_size,
        max_position_embeddings=shape.max_position_embeddings,
        layer_norm_eps=shape.layernorm_epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(rows(name, dict(ours.named_parameters())))
    return ours, theirs


def answer(theirs: Any, batch: dict[str, Tensor]) -> Any:
    """Return what their model computes from our batch, with labels for both of its losses."""
    labels = torch.full_like(batch["tokens_BS"], -100)
    for row, (chosen, targets, weights) in enumerate(
        zip(batch["chosen_BM"], batch["targets_BM"], batch["loss_weight_BM"], strict=True)
    ):
        count = int(weights.sum())
        labels[row, chosen[:count]] = targets[:count]
    return theirs(
        input_ids=batch["tokens_BS"],
        token_type_ids=batch["types_BS"],
        attention_mask=(~batch["padding_BS"]).long(),
        labels=labels,
        next_sentence_label=batch["order_B"],
    )


def test_logits(pair: tuple[Bert, Any], batch: dict[str, Tensor]) -> None:
    """Of both heads."""
    ours, theirs = pair
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        wanted = answer(theirs, batch)
        names = ("tokens_BS", "types_BS", "padding_BS")
        hidden_BSH = ours.hidden(*(batch[name] for name in names))
        found = ours.masked_logits(hidden_BSH, batch["chosen_BM"])
        torch.testing.assert_close(found[0], wanted.prediction_logits[0, batch["chosen_BM"][0]])
        torch.testing.assert_close(found[1, :1], wanted.prediction_logits[1, [4]])
        torch.testing.assert_close(ours.order_logits(hidden_BSH), wanted.seq_relationship_logits)


def test_losses_and_gradients(pair: tuple[Bert, Any], batch: dict[str, Tensor]) -> None:
    """The sum of the mean losses, and every gradient."""
    ours, theirs = pair
    ours.train()
    theirs.train()  # no dropout
    wanted = answer(theirs, batch)
    wanted.loss.backward()
    scaled = batch | {
        "loss_weight_BM": batch["loss_weight_BM"] / 4,
        "order_weight_B": batch["order_weight_B"] / 2,
    }
    found = ours.loss(**scaled)
    assert found.shape == (2,)
    found.sum().backward()
    torch.testing.assert_close(found.sum(), wanted.loss)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            rows(name, gradients), parameter.grad, rtol=1e-4, atol=1e-5, msg=name
        )
