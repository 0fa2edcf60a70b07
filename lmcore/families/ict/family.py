"""The family ICT: its record, with the table of parameters, loss and rules.  Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.families.bert.family import encoder_rows, encoder_rules, projection_rows, refusal
from lmcore.model.family import Family, ForwardFlops, Loss, Pretrained, Stack, block_flops
from lmcore.model.parameters import Parameter
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.settings import LoadedConfig

__all__ = ["ICT", "towers"]

_SHORTEST = 5


def towers(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the encoders: of questions and of blocks, or one of both."""
    return ("shared",) if shape.own["biencoder_shared_query_context_model"] else ("query", "block")


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: of each encoder a BERT's without heads, and a projection."""
    rows = encoder_rows(shape)
    if size := shape.own["biencoder_projection_dim"]:
        rows += projection_rows("projection", size, shape)
    return [replace(row, name=f"{tower}.{row.name}") for tower in towers(shape) for row in rows]


def stacks(shape: ModelShape) -> list[Stack]:
    """Return the encoders; a shared one runs on questions and on blocks."""
    names = {"shared": ""}
    tokens = {"shared": "query_BS", "query": "query_BS", "block": "block_BS"}
    return [Stack(names.get(one, one), shape.num_layers, tokens[one]) for one in towers(shape)]


def forward_flops(shape: ModelShape, seq_length: int) -> ForwardFlops:
    """Return the floating-point operations of the forward pass of a question and its block.

    Products with the blocks of the other samples are not counted: they depend on the batch.

    Args:
        shape: Sizes of the model.
        seq_length: Number of tokens of the question, and of the block.
    """
    projected = 2 * shape.hidden_size * shape.own["biencoder_projection_dim"]
    return ForwardFlops(2 * block_flops(shape, seq_length) * shape.num_layers, 2 * projected)


def rules(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that ICT does not have."""
    yield from encoder_rules(
        loaded, "ICT", context="a block's vector is computed from the states of all its tokens"
    )
    parallel = loaded.config.parallel
    if parallel.pipeline_model_parallel_size > 1:
        yield refusal(
            loaded,
            "pipeline_model_parallel_size",
            "ICT",
            "its two encoders are no sequence of layers, and both are as small as BERT",
        )
    if loaded.config.model.seq_length < _SHORTEST:
        yield ConfigError(
            f"{loaded.shown('seq_length')} is too short for ICT",
            why="three of a block's tokens mark its title and its end",
            hint=f"use `--seq-length {_SHORTEST}` or more",
        )


def _name_in_bert(name: str) -> str:
    name = name.partition(".")[2]
    return "" if name.startswith("projection.") else name


ICT = Family(
    name="ICT",
    matches=None,
    parameters=parameters,
    forward_flops=forward_flops,
    batch={
        "query_BS": "BS",
        "query_padding_BS": "BS",
        "block_BS": "BS",
        "block_padding_BS": "BS",
        "query_weight_B": "B",
    },
    losses=(Loss("retrieval loss", "query_weight_B", accuracy=True, top=(1, 5, 20, 100)),),
    model="lmcore.families.ict.model:Biencoder",
    samples="lmcore.families.ict.samples:samples",
    settings={
        "bert_post_norm": False,
        "bert_gelu": "tanh",
        "bert_token_types": 2,
        "biencoder_projection_dim": 0,
        "biencoder_shared_query_context_model": False,
        "retriever_score_scaling": False,
    },
    rules=rules,
    names={"megatron": "lmcore.families.ict.megatron:NAMES"},
    positions=("learned_absolute",),
    pretrained=Pretrained("BERT", "bert_load", _name_in_bert),
    stacks=stacks,
    pipelines=False,
    vocabulary="BertWordPieceLowerCase",
)
