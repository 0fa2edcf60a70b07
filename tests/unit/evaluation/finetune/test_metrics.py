"""Metrics against scikit-learn 1.9.1 and scipy 1.17.1, as fixed numbers, and by hand."""

from __future__ import annotations

import math

import pytest

from lmcore.evaluation.finetune.metrics import TUNED_METRICS, spread

WANTED = [1, 0, 1, 1, 0, 0, 1, 0, 1, 0]
FOUND = [1, 0, 0, 1, 1, 0, 1, 1, 1, 0]
A = [0.0, 5.0, 3.25, 3.25, 1.4, 4.75, 2.0, 0.5]
B = [0.3, 4.1, 3.9, 2.2, 2.2, 4.4, 0.9, 1.0]


@pytest.mark.parametrize(
    "name, wanted, found, value",
    [
        # accuracy_score, f1_score, matthews_corrcoef of scikit-learn.
        ("acc", WANTED, FOUND, 0.7),
        ("f1", WANTED, FOUND, 0.7272727272727273),
        ("mcc", WANTED, FOUND, 0.408248290463863),
        # pearsonr, spearmanr of scipy; both sides have equal values.
        ("pearson", A, B, 0.9034933636091567),
        ("spearman", A, B, 0.8734939759036143),
        # By hand: 2 of 3; 2 * 1 / (2 * 1 + 1 + 0); (1 * 1 - 1 * 0) / sqrt(2 * 1 * 2 * 1).
        ("acc", [1, 0, 0], [1, 1, 0], 2 / 3),
        ("f1", [1, 0, 0], [1, 1, 0], 2 / 3),
        ("mcc", [1, 0, 0], [1, 1, 0], 0.5),
        ("mse", [1.0, 2.0], [0.0, 4.0], 2.5),
        ("spearman", [1.0, 2.0, 3.0], [1.0, 8.0, 9.0], 1.0),
        ("pearson", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
        # No positive class, one class only: 0, as scikit-learn.
        ("f1", [0, 0], [0, 0], 0.0),
        ("mcc", [1, 0, 1], [1, 1, 1], 0.0),
    ],
)
def test_values(name: str, wanted: list[float], found: list[float], value: float) -> None:
    assert TUNED_METRICS[name](wanted, found).value == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_undefined_correlations(name: str) -> None:
    """Of constant predictions, and of one pair, as scipy."""
    assert math.isnan(TUNED_METRICS[name]([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]).value)
    assert math.isnan(TUNED_METRICS[name]([1.0], [2.0]).value)


def test_errors() -> None:
    """By hand: shares 1, 1, 0 have the variance 1/3; three seeds the deviation 2."""
    assert TUNED_METRICS["acc"]([1, 0, 0], [1, 0, 1]).error == pytest.approx(1 / 3)
    assert TUNED_METRICS["f1"]([1, 0, 0], [1, 0, 1]).error is None
    found = spread([1.0, 3.0, 5.0])
    assert (found.value, found.error) == (3.0, 2.0)
    assert spread([4.0]).error is None


@pytest.mark.parametrize("size", [5, 50])
def test_against_the_packages(size: int) -> None:
    """Drawn values, where scikit-learn and scipy are installed."""
    sklearn = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    import numpy as np

    drawn = np.random.default_rng(size)
    a, b = drawn.integers(0, 2, (2, size)).tolist()
    functions = {
        "acc": sklearn.accuracy_score,
        "f1": sklearn.f1_score,
        "mcc": sklearn.matthews_corrcoef,
    }
    for name, function in functions.items():
        assert TUNED_METRICS[name](a, b).value == pytest.approx(function(a, b), abs=1e-12)
    x, y = drawn.integers(0, 9, (2, size)).astype(float).tolist()
    assert TUNED_METRICS["pearson"](x, y).value == pytest.approx(stats.pearsonr(x, y)[0])
    assert TUNED_METRICS["spearman"](x, y).value == pytest.approx(stats.spearmanr(x, y)[0])
