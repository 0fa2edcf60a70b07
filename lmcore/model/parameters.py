"""`Parameter`: one row of a family's table of parameters.

Counts, shapes, splits over ranks and initial values of a model follow from the table, without
building the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ONES", "ZEROS", "Init", "Parameter", "Split", "parameter_count", "stored", "tied"]


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: a constant, or draws from a normal distribution.

    Attributes:
        mean: The constant, or the mean.
        std: Standard deviation; 0: the constant.
    """

    mean: float = 0.0
    std: float = 0.0


ONES = Init(mean=1.0)
"""Initial values of gains."""
ZEROS = Init()
"""Initial values of biases and offsets."""


@dataclass(frozen=True)
class Split:
    """Split of a parameter over the ranks of tensor parallelism.

    Attributes:
        dim: Dim that is split.
        groups: Sizes of packed projections that are split one by one, such as queries, keys and
            values; empty: the dim is split as a whole.  The table of a narrow shape (see
            `ModelShape.narrowed`) has the sizes of one rank.
    """

    dim: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """Parameter of a model.

    Attributes:
        name: Name in the model and in checkpoints.
        shape: Shape.
        init: Initial values.
        split: Split over the ranks of tensor parallelism; None: every rank has all of it.
        rows_are_tokens: True if it has a row for each token of the vocabulary.
        tied_to: Name of the parameter that is used in its place, so that this one is not stored;
            empty: it is stored.  The first and the last stage of a pipeline both have that one.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    split: Split | None = None
    rows_are_tokens: bool = False
    tied_to: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def stored(table: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that a model stores, in order, without any that is tied to another."""
    return [row for row in table if not row.tied_to]


def tied(table: Iterable[Parameter]) -> frozenset[str]:
    """Return the names of the parameters that another one is tied to."""
    return frozenset(row.tied_to for row in table if row.tied_to)


def parameter_count(table: Sequence[Parameter]) -> int:
    """Return the number of elements of all parameters, tied ones once."""
    return sum(row.size for row in stored(table))
