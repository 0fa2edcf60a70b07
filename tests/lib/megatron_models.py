"""Small models that parallel layouts divide, for tests of Megatron's files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from model_states import RandomState, bert_shape

from lmcore.conversion.state import ADAM, WEIGHT, ModelState, Progress
from lmcore.model.megatron_names import MegatronNames, names_for
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


def megatron_t5(**values: Any) -> ModelShape:
    """Return the shape of a T5 of Megatron's kind, which tensor parallelism divides.

    Args:
        values: Other values of the shape, and of T5's own settings.
    """
    own = {
        "decoder_num_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "t5_feed_forward": "gelu",
        "t5_scaled_attention": True,
        "t5_scaled_head": False,
        "t5_head_bias": True,
    }
    own |= {name: values.pop(name) for name in list(values) if name in own}
    further = tuple(sorted(own.items()))
    return replace(GPT, num_layers=2, model_family="t5", further=further, **values)


T5 = megatron_t5()
RELATIVE_T5 = megatron_t5(
    decoder_num_layers=0,
    t5_feed_forward="gated-silu",
    t5_head_bias=False,
    position_embedding_type="relative",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
BERT = megatron_bert()
MASKED_BERT = megatron_bert(bert_binary_head=False, bert_token_types=0)


def record(shape: ModelShape) -> MegatronNames:
    """Return the names of a model's family."""
    names = names_for(shape)
    assert names is not None
    return names


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
