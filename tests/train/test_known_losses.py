"""Losses of whole runs, equal to torch 2.13's with each supported version.

`UPDATE_GOLDEN=1 pytest tests/train/test_known_losses.py` records them again, in
`tests/golden/losses.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

LOSSES = Path(__file__).resolve().parents[1] / "golden/losses.json"
CLOSE = 1e-5
"""Relative: versions of torch, and processors, sum products in other orders."""

COMMON = (
    "--global-batch-size 8 --train-iters 8 --lr 1e-2 --eval-interval 4 --eval-iters 2 "
    "--split 8,2,0 --include-padding-in-loss"
)
CASES = {
    "gpt": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "llama": "--normalization RMSNorm --swiglu"
    " --ffn-hidden-size 32 --disable-bias-linear --position-embedding-type rope"
    " --group-query-attention --num-query-groups 1 --untie-embeddings-and-output-weights",
    "lamb, recomputed": "--optimizer lamb --recompute full",
}


@pytest.mark.parametrize("name", CASES)
def test_known_losses(train: Any, name: str) -> None:
    """Losses, validation losses and gradient norms; weights are updated between them."""
    run = train("run", f"{COMMON} {CASES[name]}")
    assert run.status == 0, run.err
    columns = ("loss", "grad_norm", "valid_loss")
    found = {column: [row[column] for row in run.rows if column in row] for column in columns}
    assert [len(values) for values in found.values()] == [8, 8, 2]
    known = json.loads(LOSSES.read_text(encoding="utf-8"))
    if os.environ.get("UPDATE_GOLDEN"):
        known[name] = found
        LOSSES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    for column in columns:
        assert found[column] == pytest.approx(known[name][column], rel=CLOSE), column
