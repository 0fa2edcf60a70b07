"""Metrics of predictions by a head; docs/reference/tasks.md defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from lmcore.evaluation.score import Metric, standard_error

__all__ = ["TUNED_METRICS", "spread"]

Values = Sequence[float]


def _accuracy(wanted: Values, found: Values) -> Metric:
    right = [float(a == b) for a, b in zip(wanted, found, strict=True)]
    return Metric(math.fsum(right) / len(right), standard_error(right))


def _counts(wanted: Values, found: Values) -> tuple[int, int, int, int]:
    """Return true and false positives, false and true negatives; class 1 is positive."""
    pairs = list(zip(wanted, found, strict=True))
    return (
        pairs.count((1, 1)),
        pairs.count((0, 1)),
        pairs.count((1, 0)),
        pairs.count((0, 0)),
    )


def _f1(wanted: Values, found: Values) -> Metric:
    """Return the harmonic mean of precision and recall of class 1; 0 if there is none."""
    hit, wrong, missed, _ = _counts(wanted, found)
    divisor = 2 * hit + wrong + missed
    return Metric(2 * hit / divisor if divisor else 0.0)


def _matthews(wanted: Values, found: Values) -> Metric:
    """Return Matthews correlation coefficient; 0 if one side has one class only."""
    hit, wrong, missed, rest = _counts(wanted, found)
    divisor = (hit + wrong) * (hit + missed) * (rest + wrong) * (rest + missed)
    return Metric((hit * rest - wrong * missed) / math.sqrt(divisor) if divisor else 0.0)


def _correlation(a: Values, b: Values) -> float:
    """Return Pearson's correlation; NaN if one side is constant, or there is one pair."""
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    from_a, from_b = [one - mean_a for one in a], [one - mean_b for one in b]
    size = math.sqrt(math.fsum(x * x for x in from_a)) * math.sqrt(math.fsum(x * x for x in from_b))
    if len(a) < 2 or not size:
        return math.nan
    value = math.fsum(x * y for x, y in zip(from_a, from_b, strict=True)) / size
    return min(1.0, max(-1.0, value))


def _pearson(wanted: Values, found: Values) -> Metric:
    return Metric(_correlation(wanted, found))


def _spearman(wanted: Values, found: Values) -> Metric:
    return Metric(_correlation(_ranks(wanted), _ranks(found)))


def _ranks(values: Values) -> list[float]:
    """Return the rank of each value from 1; equal ones have the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in range(first, last + 1):
            ranks[order[place]] = (first + last) / 2 + 1
        first = last + 1
    return ranks


def _squared_error(wanted: Values, found: Values) -> Metric:
    errors = [(a - b) ** 2 for a, b in zip(wanted, found, strict=True)]
    return Metric(math.fsum(errors) / len(errors), standard_error(errors))


TUNED_METRICS: Mapping[str, Callable[[Values, Values], Metric]] = {
    "acc": _accuracy,
    "f1": _f1,
    "mcc": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "mse": _squared_error,
}
"""Function of each metric: of the right classes or numbers, and of the predicted ones."""


def spread(values: Values) -> Metric:
    """Return the mean of several runs, and their standard deviation, by n - 1, as the error.

    Args:
        values: Value of each run.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Metric(mean)
    variance = math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1)
    return Metric(mean, math.sqrt(variance))
