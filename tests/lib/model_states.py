"""States in memory: every tensor random, biases and gains too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from lmcore.conversion.state import WEIGHT, ModelState, Progress
from lmcore.families.protocol import Model
from lmcore.model.family import vocabulary_parameters
from lmcore.model.shape import ModelShape

AnyModel = TypeVar("AnyModel", bound=Model)

GPT2 = ModelShape(2, 24, 3, 40, 32, 384)
LLAMA = replace(
    GPT2,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=4,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
BLOOM = ModelShape(2, 24, 3, 96, 32, 384, position_embedding_type="alibi", embed_layernorm=True)
SHAPES = {
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "llama": LLAMA,
    "llama tied, biases": replace(
        LLAMA, untie_embeddings_and_output_weights=False, add_bias_linear=True
    ),
    "llama scaled, wide heads": replace(
        LLAMA, rope_scaling_factor=8.0, rotary_base=500000, head_dim=8
    ),
    "qwen2": replace(LLAMA, add_qkv_bias=True),
    "bloom": BLOOM,
    "bloom untied": replace(
        BLOOM,
        num_attention_heads=4,
        num_query_groups=4,
        head_dim=6,
        untie_embeddings_and_output_weights=True,
    ),
}


_BERT_OWN = {
    "bert_binary_head": True,
    "bert_post_norm": True,
    "bert_gelu": "erf",
    "bert_token_types": 2,
}


def bert_shape(**own: bool | float | str) -> ModelShape:
    """Return the shape of a small BERT, by default of the original's kind.

    Args:
        own: Other values of BERT's own settings.
    """
    further = tuple(sorted((_BERT_OWN | own).items()))
    return ModelShape(2, 24, 3, 40, 12, 32, 1e-12, model_family="bert", further=further)


BERT = bert_shape()


_T5_OWN = {
    "decoder_num_layers": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "t5_feed_forward": "relu",
    "t5_scaled_attention": False,
    "t5_scaled_head": False,
    "t5_head_bias": False,
}


def t5_shape(**own: bool | int | str) -> ModelShape:
    """Return the shape of a small T5 with relative positions.

    Args:
        own: Other values of T5's own settings.
    """
    return ModelShape(
        *(2, 24, 3, 40, 32, 96, 1e-6),
        head_dim=10,
        normalization="RMSNorm",
        position_embedding_type="relative",
        add_bias_linear=False,
        model_family="t5",
        further=tuple(sorted((_T5_OWN | own).items())),
    )


class RandomState(ModelState):
    """State with random tensors."""

    format = "random"

    def __init__(self, shape: ModelShape, kinds: tuple[str, ...] = (WEIGHT,)) -> None:
        self.shape, self.kinds, self.path = shape, kinds, Path("random")
        generator = torch.Generator().manual_seed(5)
        self.tensors = {
            (name, kind): torch.randn(size, generator=generator) * 0.3
            for name, size in self.parameters.items()
            for kind in kinds
        }
        if len(kinds) > 1:
            self.progress = Progress(7, 56, optimizer_step=7, scheduled_samples=48)

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        return self.tensors[name, kind].dtype

    def read(self, name: str, kind: str = WEIGHT) -> torch.Tensor:
        return self.tensors[name, kind].clone()


def same_state(found: ModelState, expected: ModelState) -> None:
    """Compare the weights of two states bit by bit, as far as they have tokens."""
    rows = min(found.shape.padded_vocab_size, expected.shape.padded_vocab_size)
    for name in expected.parameters:
        ours, theirs = found.read(name), expected.read(name)
        if name in vocabulary_parameters(expected.shape):
            ours, theirs = ours[:rows], theirs[:rows]
        assert torch.equal(ours, theirs), name


def drawn(model: AnyModel, seed: int = 1) -> AnyModel:
    """Give a model initial weights, and random biases and gains, so that no parameter is idle."""
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model
