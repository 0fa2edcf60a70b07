"""Checks of loops on the library, and their findings."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

import lmcore
from lmcore.library.module_kernels.report import KernelReport
from lmcore.plugin import HANDED_DOWN
from lmcore_conformance.checks.training import loops
from lmcore_conformance.registry import Failure

RIGHT = {
    "losses": {"bare": [2.0, 1.0]},
    "exchanged": loops._EXCHANGED,
    "continued": {"at once": [0.5], "loaded": [0.5]},
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The part of a bench that the checks use, for the host."""
    monkeypatch.delenv(HANDED_DOWN, raising=False)
    before, threads = dict(os.environ), torch.get_num_threads()
    yield SimpleNamespace(
        selection=SimpleNamespace(plugin="cpu"),
        values=lambda *shape, seed=0: torch.randn(
            *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        ),
        host=lambda tensor: tensor.detach().double(),
        recompute_policies=[SimpleNamespace(name="full", available=lambda: None)],
    )
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


def test_the_host_passes(bench: Any) -> None:
    """Kernels, functions of `rt.ops`, and a recompute policy."""
    assert loops.kernels(bench).startswith("kernels in 1 module: losses off by ")
    assert loops.recompute(bench).startswith("full: losses off by ")


def test_a_wrong_op_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding names the op."""
    wrong = SimpleNamespace(rms_norm=lambda x, weight, epsilon: x * weight)
    monkeypatch.setattr(lmcore.Session, "ops", wrong)
    with pytest.raises(Failure, match=r"`rt.ops.rms_norm` is off by"):
        loops.kernels(bench)


def test_kernels_that_stay_are_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`undo` must take them out."""
    monkeypatch.setattr(KernelReport, "undo", lambda self: None)
    with pytest.raises(Failure, match="after `undo`"):
        loops.kernels(bench)


def test_a_recomputed_layer_with_other_numbers_is_found(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses differ from plain torch's."""

    def twice(rt: Any, layer: torch.nn.Module, policy: str) -> None:
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)

    monkeypatch.setattr(lmcore.Session, "recompute", twice)
    with pytest.raises(Failure, match="the loss of micro-batch 1 is"):
        loops.recompute(bench)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("losses", {"bare": [2.0, 1.1]}, "the loss of micro-batch 2 is 1.1"),
        ("exchanged", {**loops._EXCHANGED, "mean": 0.5}, "stage 3: collectives gave"),
        ("continued", {"at once": [0.5], "loaded": [0.4]}, r"stage 3: losses after `rt\.load`"),
    ],
)
def test_a_wrong_result_of_a_rank_is_found(key: str, value: Any, message: str) -> None:
    """A wrong result of one of two processes is found."""
    expected = {"bare": [2.0, 1.0]}
    assert loops._compare_rank(RIGHT, expected, "stage 3") == 0.0
    with pytest.raises(Failure, match=message):
        loops._compare_rank({**copy.deepcopy(RIGHT), key: value}, expected, "stage 3")
