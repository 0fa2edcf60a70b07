"""Small BERT models with every parameter random, and a batch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_states import drawn
from torch import Tensor

from lmcore.families.bert.model import Bert
from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL
from lmcore.model.shape import ModelShape

OWN = {
    "bert_binary_head": True,
    "bert_post_norm": False,
    "bert_gelu": "tanh",
    "bert_token_types": 2,
}


def shape_of(**own: Any) -> ModelShape:
    """Return the shape of a small BERT, with other values of BERT's settings."""
    return ModelShape(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        ffn_hidden_size=40,
        max_position_embeddings=12,
        padded_vocab_size=32,
        layernorm_epsilon=1e-12,
        init_method_std=0.3,
        model_family="bert",
        further=tuple(sorted((OWN | own).items())),
    )


@pytest.fixture
def make_bert(ops: OpBinding) -> Callable[..., Bert]:
    """Makes a BERT with every parameter random, so that none is idle."""

    def make(**own: Any) -> Bert:
        return drawn(Bert(shape_of(**own), ops, KEEP_ALL))

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Return two samples: one of whole length, one with padding and fewer masked tokens."""
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    return {
        "tokens_BS": torch.tensor([[2, 17, 4, 3, 29, 4, 8, 21, 3], [2, 1, 3, 30, 4, 3, 0, 0, 0]]),
        "types_BS": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0, 0]]),
        "padding_BS": padding,
        "chosen_BM": torch.tensor([[2, 5, 7], [4, 0, 0]]),
        "targets_BM": torch.tensor([[11, 5, 21], [19, 0, 0]]),
        "loss_weight_BM": torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
        "order_B": torch.tensor([1, 0]),
        "order_weight_B": torch.ones(2),
    }
