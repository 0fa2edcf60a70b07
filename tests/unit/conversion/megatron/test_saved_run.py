"""Layout and precision that arguments of Megatron record."""

from __future__ import annotations

from typing import Any

import pytest

from lmcore.conversion.megatron.saved_run import saved_layout, saved_precision


@pytest.mark.parametrize(
    "args, known, expected",
    [
        (
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 3,
                "data_parallel_size": 8,
                "context_parallel_size": 1,
            },
            {},
            {"tensor": 2, "pipeline": 4, "data": 8, "stages_per_process": 3},
        ),
        ({"model_parallel_size": 2}, {"data": 4}, {"tensor": 2, "data": 4}),
        ({"tensor_model_parallel_size": 3}, {"tensor": 2}, {"tensor": 2}),
        (
            {"world_size": 16, "context_parallel_size": 2},
            {"tensor": 2, "pipeline": 1},
            {"tensor": 2, "pipeline": 1, "data": 4, "context": 2},
        ),
        ({"world_size": 5}, {"tensor": 2, "pipeline": 1}, {"tensor": 2, "pipeline": 1}),
        ({"tensor_model_parallel_size": "2", "data_parallel_size": True}, {}, {}),
    ],
    ids=["all", "older", "known first", "world size", "no multiple", "other types"],
)
def test_layout(args: dict[str, Any], known: dict[str, Any], expected: dict[str, int]) -> None:
    """Axes have lmcore's names; what is not recorded is left out."""
    assert saved_layout(args, **known) == expected


@pytest.mark.parametrize(
    "args, expected",
    [
        ({"bf16": True, "fp16": False}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"bf16": False, "fp16": False}, "fp32"),
        ({"bf16": None}, None),
        ({}, None),
    ],
    ids=["bf16", "fp16", "fp32", "none", "nothing"],
)
def test_precision(args: dict[str, Any], expected: str | None) -> None:
    """A run without either flag set computes in float32; without both flags nothing is known."""
    assert saved_precision(args) == expected
