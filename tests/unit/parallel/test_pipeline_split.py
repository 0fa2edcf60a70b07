"""Layers and stages of each rank of a pipeline."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.config.derived.layout import ParallelLayout
from lmcore.model.family import Stack
from lmcore.parallel.pipeline_split import (
    own_part,
    owner_of,
    stack_of,
    stage_layers,
    stages_in_words,
    stages_of,
)


def stack(layers: int) -> tuple[Stack, ...]:
    """Return a model's only stack."""
    return (Stack("", layers, "tokens_BS"),)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, ParallelLayout]:
    """Draw a number of layers and a pipeline for them."""
    size = draw(st.integers(2, 8))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]))
    stages = draw(st.integers(2, 4)) if schedule == "interleaved" else 1
    if draw(st.booleans()):
        schedule, stages = "zero-bubble-v", 2
    layers = draw(st.integers(size * stages, 60 + size * stages))
    return layers, ParallelLayout(pipeline=size, stages_per_process=stages, schedule=schedule)


@given(pipelines())
def test_stages_have_all_layers_in_order(pipeline: tuple[int, ParallelLayout]) -> None:
    """Stages are split evenly; the first and the last, which have other work, are not larger."""
    layers, layout = pipeline
    found = stage_layers(stack(layers), layout)
    assert len(found) == layout.pipeline * layout.stages_per_process
    assert [layer for stage in found for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in found]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] <= sizes[0] <= max(sizes[1:-1], default=sizes[0])


@given(pipelines())
def test_processes_share_out_the_model(pipeline: tuple[int, ParallelLayout]) -> None:
    """Every layer is on one rank; one rank embeds, one has the loss."""
    layers, layout = pipeline
    parts = [own_part(stack(layers), rank, layout) for rank in range(layout.pipeline)]
    assert sorted(layer for part in parts for layer in part.layers) == list(range(layers))
    assert all(list(part.layers) == sorted(part.layers) for part in parts)
    last = 0 if layout.schedule == "zero-bubble-v" else layout.pipeline - 1
    assert [part.embedding for part in parts] == [rank == 0 for rank in range(layout.pipeline)]
    assert [part.head for part in parts] == [rank == last for rank in range(layout.pipeline)]


@given(pipelines())
def test_stages_have_owners(pipeline: tuple[int, ParallelLayout]) -> None:
    """`stages_of` and `owner_of` agree, and all ranks have equally many stages."""
    _, layout = pipeline
    for rank in range(layout.pipeline):
        own = stages_of(rank, layout)
        assert len(own) == layout.stages_per_process
        assert {owner_of(stage, layout) for stage in own} == {rank}


def test_a_v_goes_down_and_up() -> None:
    """The first process has the first and the last stage; neighbouring stages are neighbours."""
    layout = ParallelLayout(pipeline=3, stages_per_process=2, schedule="zero-bubble-v")
    assert [owner_of(stage, layout) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert all(abs(a - b) <= 1 for a, b in pairwise(owner_of(s, layout) for s in range(6)))


@pytest.mark.parametrize(
    "layers,layout,words",
    [
        (8, ParallelLayout(pipeline=2), "layers 0-3 | 4-7"),
        (10, ParallelLayout(pipeline=4), "layers 0-1 | 2-4 | 5-7 | 8-9"),
        (5, ParallelLayout(pipeline=2), "layers 0-2 | 3-4"),
        (4, ParallelLayout(pipeline=2, stages_per_process=2), "layers 0, 2 | 1, 3"),
        (
            9,
            ParallelLayout(pipeline=2, stages_per_process=2, schedule="zero-bubble-v"),
            "layers 0-1, 7-8 | 2-4, 5-6",
        ),
    ],
)
def test_words(layers: int, layout: ParallelLayout, words: str) -> None:
    """The text lists the layers of each rank."""
    assert stages_in_words(stack(layers), layout) == words


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_two_stacks(first: int, second: int, more: int, further: int) -> None:
    """Each stage has layers of one stack: of the first before the split, of the second after it."""
    sizes = (first + more, second + further)
    stacks = [Stack(name, size, "") for name, size in zip("ab", sizes, strict=True)]
    layout = ParallelLayout(pipeline=first + second, pipeline_split=first)
    found = stage_layers(stacks, layout)
    assert [layer for stage in found for layer in stage] == list(range(sum(sizes)))
    for number, stage in enumerate(found):
        assert {int(layer >= sizes[0]) for layer in stage} == {stack_of(number, layout)}
    for own in (found[:first], found[first:]):
        assert max(map(len, own)) - min(map(len, own)) <= 1


def test_two_stacks_in_words() -> None:
    """Layers are numbered within their stack."""
    stacks = [Stack("encoder", 3, ""), Stack("decoder", 4, "")]
    layout = ParallelLayout(pipeline=3, pipeline_split=2)
    assert stages_in_words(stacks, layout) == "encoder layers 0-1 | 2 | decoder layers 0-3"
    assert layout.words == "pipeline 3 (1f1b, split at 2)"
