"""Small models that parallel layouts divide, for tests of Megatron's files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from model_states import RandomState, bert_shape

from lmcore.conversion.state import ADAM, WEIGHT, ModelState, Progress
from lmcore.model.shape import ModelShape

GPT = ModelShape(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    max_position_embeddings=12,
    padded_vocab_size=24,
)
LLAMA = ModelShape(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=20,
    max_position_embeddings=12,
    padded_vocab_size=24,
    layernorm_epsilon=1e-6,
    num_query_groups=2,
    head_dim=6,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    rotary_base=50000,
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
BIASED_LLAMA = ModelShape(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=20,
    max_position_embeddings=12,
    padded_vocab_size=24,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    rope_scaling_factor=8.0,
    rotary_percent=0.5,
)


def megatron_bert(**own: Any) -> ModelShape:
    """Return the shape of a BERT of Megatron's kind, which parallel layouts divide."""
    shape = bert_shape(**{"bert_post_norm": False, "bert_gelu": "tanh"} | own)
    sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
    return replace(shape, **sizes, head_dim=4, num_query_groups=4)


BERT = megatron_bert()
MASKED_BERT = megatron_bert(bert_binary_head=False, bert_token_types=0)


class MemoryState(RandomState):
    """Model with random weights, and with the state of Adam if *optimizer* is true."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        optimizer: bool = False,
        progress: Progress | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(shape, (WEIGHT, *ADAM) if optimizer else (WEIGHT,))
        self.progress, self.vocab_size = progress, vocab_size


def assert_same(found: ModelState, expected: ModelState) -> None:
    """Compare shapes, kinds and every tensor bit by bit."""
    assert found.shape == expected.shape
    assert found.kinds == expected.kinds
    for name in expected.parameters:
        for kind in expected.kinds:
            assert torch.equal(found.read(name, kind), expected.read(name, kind)), (name, kind)


def trained() -> MemoryState:
    """Return a model with the state of Adam, at step 7."""
    return MemoryState(GPT, optimizer=True, progress=Progress(7, 70, optimizer_step=6))
