"""Split of a pipeline: the layers of each stage, and the stages of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.config.derived.layout import ParallelLayout
from lmcore.model.family import Stack
from lmcore.model.shape import ModelPart

__all__ = ["own_part", "owner_of", "stack_of", "stage_layers", "stages_in_words", "stages_of"]


def stage_layers(stacks: Sequence[Stack], layout: ParallelLayout) -> list[range]:
    """Return the layers of each stage: each stack split over its stages as evenly as possible.

    Remaining layers go to the stages between the first and the last, then to the first, then to
    the last: embedding and loss are work too.

    Args:
        stacks: Stacks of the model's layers, which are numbered through.
        layout: Parallel layout of the run, with a split for two stacks.
    """
    count, split = layout.pipeline * layout.stages_per_process, layout.pipeline_split
    ranges: list[range] = []
    for stack, stages in zip(stacks, [split, count - split] if split else [count], strict=True):
        ranges += _evenly(stack.num_layers, stages, first=ranges[-1].stop if ranges else 0)
    return ranges


def _evenly(layers: int, count: int, *, first: int) -> list[range]:
    each, extra = divmod(layers, count)
    order = [*range(1, count - 1), 0, count - 1][:count]
    larger = set(order[:extra])
    ranges = []
    for stage in range(count):
        end = first + each + (stage in larger)
        ranges.append(range(first, end))
        first = end
    return ranges


def stack_of(stage: int, layout: ParallelLayout) -> int:
    """Return the number of the stack that a stage has layers of."""
    return int(0 < layout.pipeline_split <= stage)


def stages_of(rank: int, layout: ParallelLayout) -> list[int]:
    """Return the stages of a rank of the pipeline axis, in the order of the layers."""
    return [
        stage
        for stage in range(layout.pipeline * layout.stages_per_process)
        if owner_of(stage, layout) == rank
    ]


def own_part(stacks: Sequence[Stack], rank: int, layout: ParallelLayout) -> ModelPart:
    """Return the part of the model that a rank of the pipeline axis holds."""
    layers, own = stage_layers(stacks, layout), stages_of(rank, layout)
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


def stages_in_words(stacks: Sequence[Stack], layout: ParallelLayout) -> str:
    """Return the layers of every rank as text.

    Examples are "layers 0-2 | 3-5", "layers 0, 4 | 1, 5" and "encoder layers 0-1 | 2 | decoder
    layers 0-2", whose layers are numbered within their stack.
    """
    layers = stage_layers(stacks, layout)
    words, titled = [], -1
    for rank in range(layout.pipeline):
        own = stages_of(rank, layout)
        stack = stack_of(own[0], layout)
        first = sum(one.num_layers for one in stacks[:stack])
        ranges = (range(layers[one].start - first, layers[one].stop - first) for one in own)
        title = f"{stacks[stack].name} layers ".lstrip() if stack != titled else ""
        words.append(title + ", ".join(map(_in_words, ranges)))
        titled = stack
    return " | ".join(words)


def _in_words(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
