"""Section `retro`: what Retro models and their samples have beside GPT's."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need
from lmcore.config.option import CHECKED, INPUT_PATH, option

_RETRO = Need("`--model-family retro`", lambda run: run.family in {"Retro", ""})


@dataclass(frozen=True)
class RetroSection:
    """Retro models and their neighbours; the names are Megatron's flags where it has them."""

    retro_project_dir: str | None = option(
        None,
        "Directory with the database of chunks and the neighbours of the run's samples, from "
        "`lmcore data retro`.",
        metavar="DIR",
        on_resume=CHECKED,
        needs=_RETRO,
        paths=INPUT_PATH,
    )
    retro_chunk_length: int = option(
        64,
        "Tokens of a chunk, for each of which neighbours are read; it divides seq_length.",
        minimum=1,
        maximum=1 << 16,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_num_neighbors: int = option(
        2,
        "Number of neighbours of each chunk.",
        minimum=1,
        maximum=1024,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_num_retrieved_chunks: int = option(
        2,
        "Number of chunks of a neighbour: the similar one, and those that follow it in its "
        "document.",
        minimum=1,
        maximum=64,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_encoder_layers: int = option(
        2,
        "Number of layers of the encoder of neighbours.",
        minimum=1,
        maximum=10_000,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_encoder_hidden_dropout: float = option(
        0.0,
        "Dropout probability of the encoder's outputs of attention and feed-forward layers.",
        minimum=0,
        below=1,
        needs=_RETRO,
    )
    retro_encoder_attention_dropout: float = option(
        0.0,
        "Dropout probability of the encoder's attention weights.",
        minimum=0,
        below=1,
        needs=_RETRO,
    )
    retro_first_layer: int = option(
        0,
        "Number of the first layer that reads neighbours, from 1; each third layer after it does "
        "too. 0: layer 6, with more than 15 layers 9, and in a model of fewer layers the last.",
        minimum=0,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_attention_gate: float = option(
        1.0,
        "Factor of what is read from neighbours; 0: nothing is read.",
        minimum=0,
        maximum=1,
        needs=_RETRO,
    )
    retro_cyclic_train_iters: int | None = option(
        None,
        "Number of iterations whose samples have neighbours; a longer run begins again with the "
        "first sample after them.",
        minimum=1,
        on_resume=CHECKED,
        needs=_RETRO,
    )
    retro_verify_neighbor_count: bool = option(
        True,
        "Require neighbours for every sample of the run; else samples beyond those that have "
        "neighbours are read without any.",
        needs=_RETRO,
    )
