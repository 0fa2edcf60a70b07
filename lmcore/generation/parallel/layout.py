"""Division of a model over the processes that generate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lmcore.config.derived.layout import ParallelLayout
from lmcore.errors import ConfigError, LmcoreError, counted

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["divided_shape"]


def divided_shape(shape: ModelShape, layout: ParallelLayout) -> ModelShape:
    """Return the shape of a model with a vocabulary that can be divided.

    Args:
        shape: Sizes of the checkpoint's model.
        layout: Sizes of the axes `tensor` and `pipeline`.

    Raises:
        ConfigError: Heads, channels or layers cannot be divided; with all problems.
    """
    tensor, pipeline = layout.tensor, layout.pipeline
    widths = {
        "attention heads": shape.num_attention_heads,
        "heads of keys and values": shape.num_query_groups,
        "feed-forward channels": shape.ffn_hidden_size,
    }
    problems: list[LmcoreError] = []
    undivided = [f"{size} {name}" for name, size in widths.items() if size % tensor]
    if undivided:
        problems.append(
            ConfigError(
                f"`--tensor-model-parallel-size {tensor}` does not divide the model's "
                + " and ".join(undivided),
                why="each process has the same number of them",
            )
        )
    if pipeline > shape.num_layers:
        problems.append(
            ConfigError(
                f"`--pipeline-model-parallel-size {pipeline}` is more than the model has layers",
                why=f"it has {counted(shape.num_layers, 'layer')}, and each process needs one",
            )
        )
    if problems:
        raise ConfigError.collect(problems)
    rows = -(-shape.padded_vocab_size // tensor) * tensor
    return replace(shape, padded_vocab_size=rows)
