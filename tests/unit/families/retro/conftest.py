"""Small Retro models with every parameter random, and a batch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_states import drawn
from torch import Tensor

from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL
from lmcore.families.retro.family import RETRO
from lmcore.families.retro.model import Retro
from lmcore.model.shape import ModelShape

CHUNK, NEIGHBORS, RETRIEVED = 4, 2, 8
OWN = dict(RETRO.settings) | {"retro_chunk_length": CHUNK, "retro_first_layer": 2}
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "num_query_groups": 1,
    "untie_embeddings_and_output_weights": True,
}
KINDS: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA}


def shape_of(**values: Any) -> ModelShape:
    """Return the shape of a small Retro, with other values of a shape's or of Retro's settings."""
    own = OWN | {name: values.pop(name) for name in [*values] if name in OWN}
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "ffn_hidden_size": 40,
        "max_position_embeddings": 24,
        "padded_vocab_size": 32,
        "init_method_std": 0.3,
        "model_family": "retro",
        "further": tuple(sorted(own.items())),
    }
    return ModelShape(**sizes | values)


@pytest.fixture
def make_retro(ops: OpBinding) -> Callable[..., Retro]:
    """Makes a Retro with every parameter random, so that none is idle."""

    def make(*, masked: bool = False, **values: Any) -> Retro:
        return drawn(Retro(shape_of(**values), ops, KEEP_ALL, masked=masked))

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Return two samples of three chunks: some neighbours are shorter, some chunks have fewer."""
    drawn = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (2, 3 * CHUNK + 1), generator=drawn)
    neighbors = torch.randint(0, 32, (2, 3, NEIGHBORS, RETRIEVED), generator=drawn)
    padding = torch.zeros(neighbors.shape, dtype=torch.bool)
    padding[0, 0, 1, 5:] = True
    padding[1, 1, 1] = True
    padding[1, 2] = True
    return {
        "tokens_BS": tokens[:, :-1],
        "targets_BS": tokens[:, 1:],
        "loss_weight_BS": torch.ones(2, 3 * CHUNK),
        "neighbors_BLKR": neighbors,
        "neighbor_padding_BLKR": padding,
    }
