"""Small T5 models with every parameter random, and a batch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_states import drawn
from torch import Tensor

from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL
from lmcore.families.t5.model import T5Model
from lmcore.model.shape import ModelShape

OWN = {
    "decoder_num_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "t5_feed_forward": "gelu",
    "t5_scaled_attention": True,
    "t5_scaled_head": False,
    "t5_head_bias": True,
}
ORIGINAL = {
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "t5_feed_forward": "relu",
    "t5_scaled_attention": False,
    "t5_scaled_head": True,
    "t5_head_bias": False,
}
LATER = ORIGINAL | {
    "t5_feed_forward": "gated-gelu",
    "t5_scaled_head": False,
    "untie_embeddings_and_output_weights": True,
}
KINDS: dict[str, dict[str, Any]] = {"megatron": {}, "original": ORIGINAL, "1.1": LATER}


def shape_of(**values: Any) -> ModelShape:
    """Return the shape of a small T5, with other values of a shape's or of T5's settings."""
    own = OWN | {name: values.pop(name) for name in [*values] if name in OWN}
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "head_dim": 10,
        "ffn_hidden_size": 40,
        "max_position_embeddings": 12,
        "padded_vocab_size": 32,
        "init_method_std": 0.3,
        "layernorm_epsilon": 1e-6,
        "model_family": "t5",
        "further": tuple(sorted(own.items())),
    }
    return ModelShape(**sizes | values)


@pytest.fixture
def make_t5(ops: OpBinding) -> Callable[..., T5Model]:
    """Makes a T5 with every parameter random, so that none is idle."""

    def make(*, masked: bool = False, **values: Any) -> T5Model:
        return drawn(T5Model(shape_of(**values), ops, KEEP_ALL, masked=masked))

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Return two samples: one of whole length, one with padding on both sides."""
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    return {
        "tokens_BS": torch.tensor([[2, 17, 4, 3, 29, 4, 8, 21, 3], [2, 1, 3, 30, 4, 3, 0, 0, 0]]),
        "padding_BS": padding,
        "decoder_tokens_BD": torch.tensor([[0, 5, 9, 30, 2], [0, 30, 7, 0, 0]]),
        "targets_BD": torch.tensor([[5, 9, 30, 2, 1], [30, 7, 1, 0, 0]]),
        "loss_weight_BD": torch.tensor([[1.0, 1, 1, 1, 1], [1.0, 1, 1, 0, 0]]),
    }
