"""The family Retro: its record, with the table of parameters, operations and rules.  Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.families.gpt import family as gpt
from lmcore.families.layers.parameters import block_rows, cross_attention_rows, norm_rows
from lmcore.model.family import Family, ForwardFlops, Loss, Stack, block_flops
from lmcore.model.parameters import Parameter
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.config.settings import LoadedConfig

__all__ = ["RETRO", "encoder_shape", "parameters", "reading_layers", "retrieved_length"]

_FIRST, _FIRST_OF_DEEP, _DEEP = 6, 9, 15
_STEP = 3


def reading_layers(shape: ModelShape) -> tuple[int, ...]:
    """Return the numbers of the layers that read neighbours, from 0.

    Source:
        Megatron-LM: from layer 6, or 9 of more than 15, each third; the last one where there are
        fewer is lmcore's.
    """
    number = shape.own["retro_first_layer"]
    if not number:
        usual = _FIRST if shape.num_layers <= _DEEP else _FIRST_OF_DEEP
        number = min(usual, shape.num_layers)
    return tuple(range(number - 1, shape.num_layers, _STEP))


def retrieved_length(shape: ModelShape) -> int:
    """Return the number of tokens of a neighbour."""
    return int(shape.own["retro_num_retrieved_chunks"] * shape.own["retro_chunk_length"])


def encoder_shape(shape: ModelShape) -> ModelShape:
    """Return the shape of the encoder's blocks, which differ in dropout."""
    return replace(
        shape,
        hidden_dropout=shape.own["retro_encoder_hidden_dropout"],
        attention_dropout=shape.own["retro_encoder_attention_dropout"],
    )


def stacks(shape: ModelShape) -> list[Stack]:
    """Return the encoder of neighbours, and the decoder, some of whose layers attend to it."""
    return [
        Stack("encoder", shape.own["retro_encoder_layers"], "neighbors_BLKR", gated=shape.gated),
        Stack("decoder", shape.num_layers, "tokens_BS", "neighbors_BLKR", shape.gated),
    ]


def _lengths_of(config: Config) -> dict[str, int]:
    """Return the number of chunks of a sample, of their neighbours, and of the tokens of these."""
    retro = config.retro
    return {
        "L": config.model.seq_length // retro.retro_chunk_length,
        "K": retro.retro_num_neighbors,
        "R": retro.retro_num_retrieved_chunks * retro.retro_chunk_length,
    }


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: GPT's, cross-attention in some layers, and the encoder."""
    table, crossed = gpt.parameters(shape), [f"blocks.{layer}" for layer in reading_layers(shape)]
    for layer in range(shape.own["retro_encoder_layers"]):
        table += block_rows(f"encoder.{layer}", shape)
    for name in ("encoder.0", *crossed):
        table += norm_rows(f"{name}.cross_attention_norm", shape)
        table += cross_attention_rows(f"{name}.cross_attention", shape)
    return table


def forward_flops(shape: ModelShape, seq_length: int) -> ForwardFlops:
    """Return the floating-point operations of the forward pass of a sample.

    Args:
        shape: Sizes of the model.
        seq_length: Number of tokens of the sample.
    """
    own, hidden, queries = shape.own, shape.hidden_size, shape.attention_size
    chunk, read = own["retro_chunk_length"], retrieved_length(shape)
    neighbors = seq_length // chunk * own["retro_num_neighbors"]
    states = neighbors * read

    def crossed(asking: int, asked: int, keys: int) -> int:
        products = 2 * hidden * (2 * asking * queries + 2 * asked * shape.key_size)
        return products + 4 * asking * keys * queries

    encoder = neighbors * block_flops(shape, read) * own["retro_encoder_layers"]
    encoder += crossed(states, seq_length, chunk)
    decoder = crossed(seq_length, states, own["retro_num_neighbors"] * read)
    plain = gpt.forward_flops(shape, seq_length)
    more = encoder + decoder * len(reading_layers(shape))
    return ForwardFlops(plain.layers + more, plain.rest)


def rules(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that Retro does not have."""
    config = loaded.config
    parallel, data = config.parallel, config.data
    refused = {
        "context_parallel_size": (
            parallel.context_parallel_size > 1,
            "the tokens of a chunk, which read its neighbours, would be on several processes",
            "use `--tensor-model-parallel-size` or `--zero-stage 3`",
        ),
        "pipeline_model_parallel_size": (
            parallel.pipeline_model_parallel_size > 1,
            "each stage would have to pass on the encoded neighbours beside its own result",
            "use `--tensor-model-parallel-size` or `--zero-stage 3`",
        ),
        "sequence_parallel": (
            parallel.sequence_parallel,
            "the first tokens of a sequence read no neighbours, other parts of it do",
            "leave it out, or use `--recompute full` to save memory",
        ),
        **{
            name: (
                getattr(data, name),
                "neighbours are found for whole chunks, also for one with parts of two documents",
                "leave it out",
            )
            for name in ("reset_position_ids", "reset_attention_mask")
        },
    }
    for name, (wrong, why, hint) in refused.items():
        if wrong:
            yield ConfigError(
                f"{loaded.shown(name)} is not supported by Retro models", why=why, hint=hint
            )
    yield from _lengths(loaded)


def _lengths(loaded: LoadedConfig) -> Iterator[ConfigError]:
    model, retro = loaded.config.model, loaded.config.retro
    chunk, length = retro.retro_chunk_length, model.seq_length
    if length % chunk:
        yield ConfigError(
            f"{loaded.shown('seq_length')} is not divisible by "
            f"{loaded.shown('retro_chunk_length')}",
            why="a sample is divided into chunks, each of which has neighbours",
            hint=f"use `--seq-length {max(1, length // chunk) * chunk}`, or another "
            "`--retro-chunk-length`",
        )
    read = chunk * retro.retro_num_retrieved_chunks
    positions = model.max_position_embeddings or length
    if model.position_embedding_type == "learned_absolute" and read > positions:
        yield ConfigError(
            f"a neighbour of {read} tokens exceeds the {positions} learned positions",
            why=f"it has {retro.retro_num_retrieved_chunks} chunks of {chunk} tokens, and a token "
            "beyond the last position has no embedding",
            hint=f"use `--max-position-embeddings {read}`, or a smaller "
            "`--retro-num-retrieved-chunks`",
        )
    if retro.retro_first_layer > model.num_layers:
        yield ConfigError(
            f"{loaded.shown('retro_first_layer')} exceeds {loaded.shown('num_layers')}",
            why="no layer would read neighbours",
            hint=f"use `--retro-first-layer {model.num_layers}` or less",
        )


RETRO = Family(
    name="Retro",
    matches=None,
    parameters=parameters,
    forward_flops=forward_flops,
    batch={
        "tokens_BS": "BS",
        "targets_BS": "BS",
        "loss_weight_BS": "BS",
        "neighbors_BLKR": "BLKR",
        "neighbor_padding_BLKR": "BLKR",
    },
    losses=(Loss("lm loss", "loss_weight_BS"),),
    targets="targets_BS",
    model="lmcore.families.retro.model:Retro",
    samples="lmcore.families.retro.samples:samples",
    settings={
        "retro_chunk_length": 64,
        "retro_num_neighbors": 2,
        "retro_num_retrieved_chunks": 2,
        "retro_encoder_layers": 2,
        "retro_encoder_hidden_dropout": 0.0,
        "retro_encoder_attention_dropout": 0.0,
        "retro_first_layer": 0,
        "retro_attention_gate": 1.0,
    },
    not_in_the_weights=frozenset(
        {
            "retro_encoder_hidden_dropout",
            "retro_encoder_attention_dropout",
            "retro_attention_gate",
        }
    ),
    rules=rules,
    every_position_is_a_target=True,
    stacks=stacks,
    lengths=_lengths_of,
    pipelines=False,
)
