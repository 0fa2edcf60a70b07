"""Outputs of a head: passes that replicas compute have the outputs of one model, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.evaluation.finetune.model import HeadModel, HeadPass
from lmcore.evaluation.finetune.record import LabelledRow
from lmcore.families.build import create_model
from lmcore.families.heads.samples import pair_format
from lmcore.families.op_binding import OpBinding
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape

TASKS = {
    "classification": {"task": "classification", "num_labels": 3},
    "multiple-choice": {"task": "multiple-choice", "num_labels": 2},
    "regression": {"task": "regression", "num_labels": 1},
}


def head(task: str) -> HeadModel:
    """Return a GPT of random weights with a head."""
    shape = ModelShape(2, 24, 3, 40, 48, 384, init_method_std=0.3, **TASKS[task])  # type: ignore[arg-type]
    model: Any = create_model(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(5)
    tokenizer = ByteTokenizer()
    pairs = pair_format(shape, tokenizer, 48)
    return HeadModel(model.eval(), tokenizer, PLAIN, pairs, (), None, Path("run"))


class FakeReplicas:
    """Replicas of the same model, which get and give JSON, as through the store."""

    size = 3

    def __init__(self, replica: HeadModel) -> None:
        self._replica = replica
        self.computed = 0

    def share(
        self,
        passes: Sequence[HeadPass],
        own: Callable[[Sequence[HeadPass]], list[Any]],
        encode: Callable[[HeadPass], Any],
        decode: Callable[[Any], Any],
    ) -> list[Any]:
        """Return the results: the first pass is computed by the caller."""
        found = own(passes[:1])
        for one in passes[1:]:
            given = HeadPass.of(json.loads(json.dumps(encode(one))))
            made = self._replica._passes([given])
            found += [decode(value) for value in json.loads(json.dumps(made))]
            self.computed += 1
        return found


@pytest.mark.parametrize("task", TASKS)
def test_outputs_of_replicas(task: str) -> None:
    rows = [
        LabelledRow(
            ("It is" + " so" * (number % 7),),
            ("yes", "no", "may be")[: 2 + number % 2] if task == "multiple-choice" else (),
            0,
            f"row {number}",
        )
        for number in range(20)
    ]
    done: list[int] = []
    pool: Any = FakeReplicas(head(task))
    alone = head(task).predict(rows, tokens=64)
    shared = head(task).predict(rows, tokens=64, progress=done.append, pool=pool)
    assert shared == alone
    assert pool.computed > 3
    assert sum(done) == len(rows)
    assert len({tuple(scores) for scores in alone.scores}) > 5
