"""Family for tests that has nothing of a GPT but its blocks: a bidirectional encoder.

It restores hidden tokens.  Its samples are not arrays, the tensors of its batches have other names
and another order, and its loss is its own.  `register` adds it to lmcore's registries; the settings
choose it by `--position-embedding-type none`.

Shapes: B micro-batch, S sequence, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.data.blend.sources import GPTSamples, OpenSource, SampleSettings
from lmcore.data.loading.batch import Batch, check_vocabulary
from lmcore.families.layers.parameters import block_rows, norm_rows
from lmcore.families.layers.projection import Embedding
from lmcore.families.layers.transformer import Block, norm_of
from lmcore.families.protocol import Model
from lmcore.families.sample_format import SampleFormat
from lmcore.model.family import Family, ForwardFlops, Loss, families
from lmcore.model.parameters import ZEROS, Init, Parameter, parameter_count
from lmcore.model.shape import ModelShape

NAME = "Encoder"
NUM_TYPES = 2


class Encoder(Model):
    """Encoder whose tokens attend to all others, with embeddings of types and its own loss."""

    causal = False

    def __init__(self, shape: Any, ops: Any, recompute: Any, **options: Any) -> None:
        super().__init__(shape, ops, recompute, **options)
        self.words = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.places = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.types = Embedding(NUM_TYPES, shape.hidden_size)
        self.body = nn.ModuleList(
            Block(shape, ops, recompute.attention, causal=False) for _ in self.part.layers
        )
        self.norm = norm_of(shape, ops)
        self.output_bias = nn.Parameter(torch.zeros(shape.padded_vocab_size))

    @property
    def layers(self) -> list[nn.Module]:
        """Blocks, in order."""
        return list(self.body)

    def loss(
        self,
        *,
        hidden_weight_BS: Tensor,
        originals_BS: Tensor,
        inputs_BS: Tensor,
        types_BS: Tensor,
    ) -> Tensor:
        """Return the weighted sum of the cross entropies of the hidden tokens."""
        places_S = torch.arange(inputs_BS.shape[1], device=inputs_BS.device)
        x_BSH = self.words(inputs_BS) + self.places(places_S) + self.types(types_BS)
        x_BSH = self.norm(self.recompute.run_blocks(self.layers, x_BSH))
        logits_BSV = functional.linear(x_BSH, self.words.weight, self.output_bias)
        losses = functional.cross_entropy(
            logits_BSV.flatten(0, 1).float(), originals_BS.flatten(), reduction="none"
        )
        return (losses * hidden_weight_BS.flatten()).sum()


@dataclass(frozen=True)
class MaskedSample:
    """Tokens, and True where a token is hidden from the model."""

    tokens_S: np.ndarray[Any, np.dtype[np.int64]]
    hidden_S: np.ndarray[Any, np.dtype[np.bool_]]


class MaskedDataset:
    """Windows of tokens, a fifth of them hidden; see `SourceSamples`."""

    def __init__(self, windows: Any, seed: int) -> None:
        self.windows, self.seed = windows, seed
        self.key, self.order = windows.key, f"masked:{seed}:{windows.order}"
        self.available = windows.available

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> MaskedSample:
        return self.read(i)

    def read(self, i: int) -> MaskedSample:
        """Return sample *i*, with the same hidden tokens each time."""
        tokens_S = self.windows.read(i)[:-1]
        hidden_S = np.random.default_rng([self.seed, i]).random(len(tokens_S)) < 0.2
        return MaskedSample(tokens_S, hidden_S)


class MaskedSamples(GPTSamples):
    """Builder of samples with hidden tokens."""

    def build(  # type: ignore[override]
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> MaskedDataset:
        """Return the samples of a source."""
        return MaskedDataset(super().build(source, num_samples, settings, name=name), settings.seed)


def masked_format(plan: Any, tokenizer: Any) -> SampleFormat:
    """Return builder and collation of a run's samples."""

    def collate(samples: Sequence[MaskedSample], first: int) -> Batch:
        tokens_BS = torch.from_numpy(np.stack([sample.tokens_S for sample in samples]))
        hidden_BS = torch.from_numpy(np.stack([sample.hidden_S for sample in samples]))
        check_vocabulary(tokens_BS, plan.vocab_size, first)
        second_half_S = torch.arange(tokens_BS.shape[1]) >= tokens_BS.shape[1] // 2
        types_BS = second_half_S.long().expand_as(tokens_BS).contiguous()
        inputs_BS = tokens_BS.masked_fill(hidden_BS, tokenizer.eod)
        return {
            "inputs_BS": inputs_BS,
            "types_BS": types_BS,
            "originals_BS": tokens_BS,
            "hidden_weight_BS": hidden_BS.float(),
        }

    return SampleFormat(MaskedSamples(), collate)


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: embeddings, blocks, norm and bias of the head."""
    wide, hidden = Init(std=0.1), shape.hidden_size
    sizes = {
        "words": shape.padded_vocab_size,
        "places": shape.max_position_embeddings,
        "types": NUM_TYPES,
    }
    table = [Parameter(f"{name}.weight", (size, hidden), wide) for name, size in sizes.items()]
    for layer in range(shape.num_layers):
        table += block_rows(f"body.{layer}", shape)
    bias = Parameter("output_bias", (shape.padded_vocab_size,), ZEROS)
    return [*table, *norm_rows("norm", shape), bias]


def forward_flops(shape: ModelShape, seq_length: int) -> ForwardFlops:
    """Return two for each parameter and token."""
    return ForwardFlops(0, 2 * seq_length * parameter_count(parameters(shape)))


def register() -> None:
    """Add the family to the registry, before the families that match any settings."""
    family = Family(
        name=NAME,
        matches=lambda settings: settings.position_embedding_type == "none",
        parameters=parameters,
        forward_flops=forward_flops,
        batch=dict.fromkeys(("inputs_BS", "types_BS", "originals_BS", "hidden_weight_BS"), "BS"),
        losses=(Loss("lm loss", "hidden_weight_BS"),),
        model="layouts.encoder_model:Encoder",
        samples="layouts.encoder_model:masked_format",
    )
    registry = families()
    others = dict(registry)
    registry.clear()
    registry.update({NAME: family} | others)
