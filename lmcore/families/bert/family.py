"""The family BERT: its record, with the table of parameters, losses and rules.  Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.families.layers.parameters import block_rows, norm_rows
from lmcore.model.family import Body, Family, ForwardFlops, Loss, block_flops
from lmcore.model.parameters import ZEROS, Init, Parameter, Split
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.settings import LoadedConfig

__all__ = ["BERT", "encoder_rows", "encoder_rules", "parameters", "projection_rows", "refusal"]

_MASKED = 0.15
"""Share of the tokens that are predicted by default, for the FLOPs of the head."""


def encoder_rows(shape: ModelShape) -> list[Parameter]:
    """Return the rows of embeddings and blocks, without heads."""
    hidden, own = shape.hidden_size, shape.own
    usual = Init(std=shape.init_method_std)
    rows = (shape.padded_vocab_size, hidden)
    table = [
        Parameter("token_embedding.weight", rows, usual, Split(0), rows_are_tokens=True),
        Parameter("position_embedding.weight", (shape.max_position_embeddings, hidden), usual),
    ]
    if own["bert_token_types"]:
        table.append(Parameter("type_embedding.weight", (own["bert_token_types"], hidden), usual))
    if own["bert_post_norm"]:
        table += norm_rows("embedding_norm", shape)
    for layer in range(shape.num_layers):
        table += block_rows(f"blocks.{layer}", shape)
    if not own["bert_post_norm"]:
        table += norm_rows("final_norm", shape)
    return table


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: embeddings, blocks, and the heads of both losses."""
    hidden, table = shape.hidden_size, encoder_rows(shape)
    tokens = table[0]
    table += [
        *projection_rows("masked_head.dense", hidden, shape),
        *norm_rows("masked_head.norm", shape),
        Parameter("masked_head.bias", tokens.shape[:1], ZEROS, Split(0), rows_are_tokens=True),
    ]
    if shape.own["bert_binary_head"]:
        table += projection_rows("pooler", hidden, shape) + projection_rows("order_head", 2, shape)
    # The head's rows are the token embedding's.
    return [*table, replace(tokens, name="output_embedding.weight", tied_to=tokens.name)]


def projection_rows(name: str, size: int, shape: ModelShape) -> list[Parameter]:
    """Return the rows of a projection of hidden states with a bias, which is not split."""
    weight = Init(std=shape.init_method_std)
    return [
        Parameter(f"{name}.weight", (size, shape.hidden_size), weight),
        Parameter(f"{name}.bias", (size,), ZEROS),
    ]


def forward_flops(shape: ModelShape, seq_length: int) -> ForwardFlops:
    """Return the floating-point operations of the forward pass of a sample.

    The head predicts the masked tokens only, 15% of the sequence.

    Args:
        shape: Sizes of the model.
        seq_length: Number of tokens of the sample.
    """
    hidden = shape.hidden_size
    predicted = max(1, int(_MASKED * seq_length))
    head = predicted * 2 * hidden * (hidden + shape.padded_vocab_size)
    pooled = 2 * hidden * (hidden + 2) if shape.own["bert_binary_head"] else 0
    return ForwardFlops(block_flops(shape, seq_length) * shape.num_layers, head + pooled)


def rules(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that BERT does not have."""
    yield from encoder_rules(
        loaded,
        "BERT",
        context="the masked tokens are predicted together, from states of a sample's whole "
        "sequence",
    )
    if loaded.config.model.untie_embeddings_and_output_weights:
        yield refusal(
            loaded,
            "untie_embeddings_and_output_weights",
            "BERT",
            "BERT's head has the weights of the token embedding",
        )
    if loaded.config.model.seq_length < _SHORTEST:
        yield ConfigError(
            f"{loaded.shown('seq_length')} is too short for BERT",
            why="three of the tokens mark the segments, and each segment has a token",
            hint=f"use `--seq-length {_SHORTEST}` or more",
        )


def encoder_rules(loaded: LoadedConfig, name: str, *, context: str) -> Iterator[ConfigError]:
    """Yield an error for each setting that the encoder of the family *name* does not have.

    Args:
        loaded: Settings of the run.
        name: Name of the family.
        context: Reason why sequences are not divided over processes.
    """
    config = loaded.config
    if config.parallel.context_parallel_size > 1:
        yield refusal(loaded, "context_parallel_size", name, context)
    for option in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(config.data, option):
            yield refusal(loaded, option, name, f"each of {name}'s samples is of one document")


def refusal(loaded: LoadedConfig, option: str, name: str, why: str) -> ConfigError:
    """Return the error of a setting that the models of the family *name* do not have."""
    return ConfigError(
        f"{loaded.shown(option)} is not supported by {name} models", why=why, hint="leave it out"
    )


_SHORTEST = 5
_BATCH = {
    "tokens_BS": "BS",
    "types_BS": "BS",
    "padding_BS": "BS",
    "chosen_BM": "BM",
    "targets_BM": "BM",
    "loss_weight_BM": "BM",
}
_MASKED_LM = Loss("lm loss", "loss_weight_BM", accuracy=True)
_MASKED_ONLY = Family(
    name="BERT",
    matches=None,
    parameters=parameters,
    forward_flops=forward_flops,
    batch=_BATCH,
    losses=(_MASKED_LM,),
    model="lmcore.families.bert.model:Bert",
    samples="lmcore.families.bert.samples:samples",
    settings={
        "bert_binary_head": True,
        "bert_post_norm": False,
        "bert_gelu": "tanh",
        "bert_token_types": 2,
    },
    rules=rules,
    names={
        "huggingface": "lmcore.families.bert.huggingface:ARCHITECTURES",
        "megatron": "lmcore.families.bert.megatron:NAMES",
    },
    positions=("learned_absolute",),
    body=Body(
        inputs=("tokens_BS", "types_BS", "padding_BS"),
        heads=frozenset({"masked_head", "pooler", "order_head", "output_embedding"}),
        bidirectional=True,
    ),
    vocabulary="BertWordPieceLowerCase",
)
_WITH_ORDER = replace(
    _MASKED_ONLY,
    batch={**_BATCH, "order_B": "B", "order_weight_B": "B"},
    losses=(_MASKED_LM, Loss("sop loss", "order_weight_B", accuracy=True)),
)
BERT = replace(
    _WITH_ORDER,
    variant=lambda shape: _WITH_ORDER if shape.own["bert_binary_head"] else _MASKED_ONLY,
)
