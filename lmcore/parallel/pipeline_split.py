"""Split of a pipeline: the layers of each stage, and the stages of each rank."""

from __future__ import annotations

from lmcore.config.derived.layout import ParallelLayout
from lmcore.model.shape import ModelPart

__all__ = ["own_part", "owner_of", "stage_layers", "stages_in_words", "stages_of"]


def stage_layers(num_layers: int, layout: ParallelLayout) -> list[range]:
    """Return the layers of each stage, split as evenly as possible.

    Remaining layers go to the stages between the first and the last, then to the first, then to
    the last: embedding and loss are work too.

    Args:
        num_layers: Number of layers of the model.
        layout: Parallel layout of the run.
    """
    count = layout.pipeline * layout.stages_per_process
    each, extra = divmod(num_layers, count)
    order = [*range(1, count - 1), 0, count - 1][:count]
    larger = set(order[:extra])
    ranges, first = [], 0
    for stage in range(count):
        end = first + each + (stage in larger)
        ranges.append(range(first, end))
        first = end
    return ranges


def stages_of(rank: int, layout: ParallelLayout) -> list[int]:
    """Return the stages of a rank of the pipeline axis, in the order of the layers."""
    return [
        stage
        for stage in range(layout.pipeline * layout.stages_per_process)
        if owner_of(stage, layout) == rank
    ]


def own_part(num_layers: int, rank: int, layout: ParallelLayout) -> ModelPart:
    """Return the part of the model that a rank of the pipeline axis holds."""
    layers, own = stage_layers(num_layers, layout), stages_of(rank, layout)
    return ModelPart(
        tuple(layer for stage in own for layer in layers[stage]),
        embedding=0 in own,
        head=len(layers) - 1 in own,
    )


def owner_of(stage: int, layout: ParallelLayout) -> int:
    """Return the rank of the pipeline axis that has a stage."""
    if layout.schedule == "zero-bubble-v":  # from the first rank to the last and back
        return min(stage, 2 * layout.pipeline - 1 - stage)
    return stage % layout.pipeline


def stages_in_words(num_layers: int, layout: ParallelLayout) -> str:
    """Return the layers of every rank as text, such as "layers 0-2 | 3-5" or "0, 4 | 1, 5"."""
    layers = stage_layers(num_layers, layout)
    return "layers " + " | ".join(
        ", ".join(_in_words(layers[stage]) for stage in stages_of(rank, layout))
        for rank in range(layout.pipeline)
    )


def _in_words(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
