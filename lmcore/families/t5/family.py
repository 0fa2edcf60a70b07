"""The family T5: its record, with the table of parameters, loss and rules.  Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.families.layers.parameters import block_rows, cross_attention_rows, norm_rows
from lmcore.model.family import Family, ForwardFlops, Loss, Stack, block_flops
from lmcore.model.parameters import ZEROS, Init, Parameter, Split
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.config.settings import LoadedConfig

__all__ = ["T5", "decoder_layers", "decoder_length", "gated", "parameters", "stack_shape"]

_DECODER_LENGTH = 128
"""Default of `--decoder-seq-length`, unless the encoder's is less."""
SHORTEST = 4
"""Least length of the encoder's sequence: two special tokens are subtracted, as in Megatron."""
SHORTEST_DECODER = 3
"""Least length of the decoder's sequence: its begin, a sentinel and a token."""
MEAN_SPAN = 4.46
"""Mean of the words of a span: geometric with p = 0.2, at most ten."""


def decoder_layers(shape: ModelShape) -> int:
    """Return the number of layers of the decoder."""
    return int(shape.own["decoder_num_layers"]) or shape.num_layers


def decoder_length(config: Config) -> int:
    """Return the length of the decoder's part of a sample, in tokens."""
    return config.t5.decoder_seq_length or min(_DECODER_LENGTH, config.model.seq_length)


def gated(shape: ModelShape) -> bool:
    """Return True if the feed-forward layers have a gate."""
    return str(shape.own["t5_feed_forward"]).startswith("gated-")


def stack_shape(shape: ModelShape, *, decoder: bool) -> ModelShape:
    """Return the shape of the blocks of one stack, whose feed-forward layers may have a gate."""
    layers = decoder_layers(shape) if decoder else shape.num_layers
    return replace(shape, num_layers=layers, swiglu=gated(shape))


def stacks(shape: ModelShape) -> list[Stack]:
    """Return the encoder, and the decoder that attends to it."""
    source, gates = "tokens_BS", gated(shape)
    return [
        Stack("encoder", shape.num_layers, source, gated=gates),
        Stack("decoder", decoder_layers(shape), "decoder_tokens_BD", source, gates),
    ]


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: embeddings, both stacks, and the head."""
    own, usual = shape.own, Init(std=shape.init_method_std)
    rows = (shape.padded_vocab_size, shape.hidden_size)
    table = [Parameter("token_embedding.weight", rows, usual, Split(0), rows_are_tokens=True)]
    if shape.learned_positions:
        positions = (shape.max_position_embeddings, shape.hidden_size)
        table.append(Parameter("position_embedding.weight", positions, usual))
    for stack in ("encoder", "decoder"):
        blocks = stack_shape(shape, decoder=stack == "decoder")
        if shape.relative_positions:
            size = (own["relative_attention_num_buckets"], shape.num_attention_heads)
            table.append(Parameter(f"{stack}_bias.weight", size, usual, Split(1)))
        for layer in range(blocks.num_layers):
            table += block_rows(f"{stack}.{layer}", blocks)
            if stack == "decoder":
                table += norm_rows(f"{stack}.{layer}.cross_attention_norm", blocks)
                table += cross_attention_rows(f"{stack}.{layer}.cross_attention", blocks)
        table += norm_rows(f"{stack}_norm", shape)
    if own["t5_head_bias"]:
        table.append(Parameter("head.bias", rows[:1], ZEROS, Split(0), rows_are_tokens=True))
    tied_to = table[0].name if shape.tied else ""
    head = Parameter("output_embedding.weight", rows, usual, Split(0), True, tied_to)  # noqa: FBT003
    return [*table, head]


def forward_flops(
    shape: ModelShape, seq_length: int, decoder_seq_length: int | None = None
) -> ForwardFlops:
    """Return the floating-point operations of the forward pass of a sample.

    Args:
        shape: Sizes of the model.
        seq_length: Number of tokens of the encoder's sequence.
        decoder_seq_length: Number of tokens of the decoder's sequence; None: the same.
    """
    own = seq_length if decoder_seq_length is None else decoder_seq_length
    hidden, queries = shape.hidden_size, shape.attention_size
    crossed = 2 * hidden * (2 * own * queries + 2 * seq_length * shape.key_size)
    crossed += 4 * own * seq_length * queries
    encoder = block_flops(stack_shape(shape, decoder=False), seq_length) * shape.num_layers
    decoder = block_flops(stack_shape(shape, decoder=True), own) + crossed
    head = own * 2 * hidden * shape.padded_vocab_size
    return ForwardFlops(encoder + decoder * decoder_layers(shape), head)


def _flops_of(shape: ModelShape, config: Config) -> ForwardFlops:
    return forward_flops(shape, config.model.seq_length, decoder_length(config))


def rules(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that T5 does not have."""
    config = loaded.config
    refused = {
        "swiglu": (
            config.model.swiglu,
            "its feed-forward layers have an option with more activations",
            "use `--t5-feed-forward gated-silu`",
        ),
        "context_parallel_size": (
            config.parallel.context_parallel_size > 1,
            "the decoder attends to a sequence of another length, the encoder's",
            "use `--sequence-parallel`, which divides activations as well",
        ),
        **{
            name: (
                getattr(config.data, name),
                "each of T5's samples is of one document",
                "leave it out",
            )
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        },
    }
    for name, (wrong, why, hint) in refused.items():
        if wrong:
            yield ConfigError(
                f"{loaded.shown(name)} is not supported by T5 models", why=why, hint=hint
            )
    yield from _lengths(loaded)


def _lengths(loaded: LoadedConfig) -> Iterator[ConfigError]:
    config = loaded.config
    model, parallel = config.model, config.parallel
    length, own = model.seq_length, decoder_length(config)
    if length < SHORTEST:
        yield ConfigError(
            f"{loaded.shown('seq_length')} is too short for T5",
            why="two tokens are kept free, and at least two are text",
            hint=f"use `--seq-length {SHORTEST}` or more",
        )
        return
    masked = max(1.0, config.bert.mask_prob * (length - 2))
    wanted = max(SHORTEST_DECODER, int(masked + max(1.0, masked / MEAN_SPAN)) + 1)
    if own < wanted:
        yield ConfigError(
            f"{loaded.shown('decoder_seq_length')} is too short for T5"
            if config.t5.decoder_seq_length
            else f"the decoder's sequence of {own} tokens is too short for T5",
            why=f"of {length} tokens some {masked:.0f} are removed, in "
            f"{max(1.0, masked / MEAN_SPAN):.0f} spans with a sentinel each, which the decoder "
            "has to restore",
            hint=f"use `--decoder-seq-length {wanted}` or more, or a smaller `--mask-prob`",
        )
    positions = model.max_position_embeddings or length
    if model.position_embedding_type == "learned_absolute" and own > positions:
        yield ConfigError(
            f"{loaded.shown('decoder_seq_length')} exceeds "
            + (
                loaded.shown("max_position_embeddings")
                if model.max_position_embeddings
                else f"the {positions} learned positions"
            ),
            why="encoder and decoder have the same positions, and a token beyond the last one has "
            "no embedding",
            hint=f"use `--max-position-embeddings {own}` or `--decoder-seq-length {positions}`",
        )
    if parallel.sequence_parallel and own % parallel.tensor_model_parallel_size:
        yield ConfigError(
            f"the decoder's sequence of {own} tokens is not divisible by "
            f"{loaded.shown('tensor_model_parallel_size')}",
            why="with `--sequence-parallel` each process has an equal part of a sequence",
            hint="use another `--decoder-seq-length`",
        )


T5 = Family(
    name="T5",
    matches=None,
    parameters=parameters,
    forward_flops=forward_flops,
    batch={
        "tokens_BS": "BS",
        "padding_BS": "BS",
        "decoder_tokens_BD": "BD",
        "targets_BD": "BD",
        "loss_weight_BD": "BD",
    },
    losses=(Loss("lm loss", "loss_weight_BD"),),
    model="lmcore.families.t5.model:T5Model",
    samples="lmcore.families.t5.samples:samples",
    settings={
        "decoder_num_layers": 0,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "t5_feed_forward": "gelu",
        "t5_scaled_attention": True,
        "t5_scaled_head": False,
        "t5_head_bias": True,
    },
    rules=rules,
    names={
        "huggingface": "lmcore.families.t5.huggingface:ARCHITECTURES",
        "megatron": "lmcore.families.t5.megatron:NAMES",
    },
    positions=("learned_absolute", "relative"),
    forward_flops_of=_flops_of,
    stacks=stacks,
    lengths=lambda config: {"D": decoder_length(config)},
    vocabulary="BertWordPieceLowerCase",
)
