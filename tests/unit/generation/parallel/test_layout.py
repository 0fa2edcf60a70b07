"""Models that can be divided, and models that cannot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lmcore.config.derived.layout import ParallelLayout
from lmcore.errors import ConfigError
from lmcore.generation.parallel.layout import divided_shape
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(3, 24, 6, 40, 32, 257, num_query_groups=2)


@pytest.mark.parametrize("tensor, rows", [(1, 257), (2, 258)])
def test_padded_vocabulary(tensor: int, rows: int) -> None:
    """Rows are added until the ranks divide them; nothing else changes."""
    found = divided_shape(SHAPE, ParallelLayout(tensor=tensor, pipeline=3))
    assert found == replace(SHAPE, padded_vocab_size=rows)


@pytest.mark.parametrize(
    "layout, problems",
    [
        (ParallelLayout(tensor=3), ["does not divide the model's 2 heads of keys and values and"]),
        (ParallelLayout(tensor=5), ["model's 6 attention heads and 2 heads of keys"]),
        (ParallelLayout(pipeline=4), ["it has 3 layers"]),
        (ParallelLayout(tensor=3, pipeline=4), ["parallel-size 3`", "parallel-size 4`"]),
    ],
)
def test_problems_at_once(layout: ParallelLayout, problems: list[str]) -> None:
    """Each message has the model's numbers."""
    with pytest.raises(ConfigError) as caught:
        divided_shape(SHAPE, layout)
    for problem in problems:
        assert re.search(re.escape(problem), caught.value.render())
