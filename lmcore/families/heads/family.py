"""`with_head`: the record of a family whose heads are replaced by one for a task.  Torch-free."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.model.family import Body, Family, ForwardFlops, Loss
from lmcore.model.parameters import ZEROS, Init, Parameter
from lmcore.model.shape import ModelShape

__all__ = ["CHOICE", "CLASSIFICATION", "REGRESSION", "HeadFamily", "with_head"]

CLASSIFICATION, CHOICE, REGRESSION = "classification", "multiple-choice", "regression"
_MODULES = frozenset({"pooler", "classifier"})
_BATCH = {"pooled_B": "B", "label_Q": "Q", "label_weight_Q": "Q"}


@dataclass(frozen=True, eq=False)
class HeadFamily(Family):
    """Family with a head for a task; see `TaskHead` for its model.

    A micro-batch has Q labelled samples and B sequences: for multiple choice, one for each choice.

    Attributes:
        base: The family with its own heads.
        task: `--task`.
    """

    base: Family | None = None
    task: str = ""

    @property
    def key(self) -> str:
        """Value of `--model-family`."""
        assert self.base is not None
        return self.base.key

    @staticmethod
    def is_of_head(name: str) -> bool:
        """Return True if a parameter is the head's, not of the layers below it."""
        return name.partition(".")[0] in _MODULES

    def load_model(self) -> Any:
        """Return the class of the models."""
        assert self.base is not None
        return super().load_model()(self.base.load_model())


@functools.cache
def with_head(base: Family, task: str) -> HeadFamily:
    """Return the record of *base* with a head for a task in place of the heads of pretraining.

    Args:
        base: The family.
        task: `--task`.

    Raises:
        ConfigError: The family has no such head.
    """
    body = base.body
    if body is None:
        raise ConfigError(
            f"`--task {task}` is not supported by {base.name} models",
            why="the family does not say where a head could be attached",
            hint="use a family that has heads, such as BERT",
        )
    batch = {name: base.batch[name] for name in body.inputs} | _BATCH
    if task == CHOICE:
        batch["choices_QC"] = "QC"
    kept = {field.name: getattr(base, field.name) for field in dataclasses.fields(Family)}
    changed = {
        "name": f"{base.name} for {task.replace('-', ' ')}",
        "parameters": functools.partial(_parameters, base, body),
        "forward_flops": functools.partial(_forward_flops, base, body),
        "batch": batch,
        "losses": (
            Loss(f"{task.replace('-', ' ')} loss", "label_weight_Q", accuracy=task != REGRESSION),
        ),
        "model": "lmcore.families.heads.model:head_model",
        "samples": "lmcore.families.heads.samples:samples",
        "optional": frozenset(),
        "targets": "",
        "variant": None,
        "names": {},
        "every_position_is_a_target": False,
    }
    return HeadFamily(**(kept | changed), base=base, task=task)


def _outputs(shape: ModelShape) -> int:
    """Return the rows of the head: one for each class; other tasks have one number."""
    return shape.num_labels if shape.task == CLASSIFICATION else 1


def _parameters(base: Family, body: Body, shape: ModelShape) -> Sequence[Parameter]:
    hidden, weight = shape.hidden_size, Init(std=shape.init_method_std)
    rows = [row for row in base.parameters(shape) if row.name.partition(".")[0] not in body.heads]
    if body.bidirectional:
        rows += [
            Parameter("pooler.weight", (hidden, hidden), weight),
            Parameter("pooler.bias", (hidden,), ZEROS),
        ]
    rows.append(Parameter("classifier.weight", (_outputs(shape), hidden), weight))
    if body.bidirectional:
        rows.append(Parameter("classifier.bias", (_outputs(shape),), ZEROS))
    return rows


def _forward_flops(base: Family, body: Body, shape: ModelShape, seq_length: int) -> ForwardFlops:
    sequences = shape.num_labels if shape.task == CHOICE else 1
    pooled = shape.hidden_size if body.bidirectional else 0
    layers = base.forward_flops(shape, seq_length).layers
    head = 2 * shape.hidden_size * (pooled + _outputs(shape))
    return ForwardFlops(sequences * layers, sequences * head)
