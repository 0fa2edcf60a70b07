"""`TaskHead`: a head for a task on the hidden state of one token of each sequence.

Shapes: B sequences, S sequence, H hidden, Q labelled samples, C choices of a question; B is Q, or
Q * C for multiple choice.  L is the number of classes, or 1 for other tasks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.heads.family import CHOICE, REGRESSION
from lmcore.families.layers.projection import Linear
from lmcore.families.protocol import Model, TensorParallelPlan

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding

__all__ = ["TaskHead", "head_model"]


class TaskHead(Model):
    """Model with a head for a task in place of the heads of the class after it.

    That class has `build_heads`, `head_modules` and `losses_of`; see `Body`.  A bidirectional
    model pools the first token by a projection and tanh, as BERT; a causal one takes the last
    token's state as it is.
    """

    @property
    def head_weight(self) -> None:
        """No weight with a row for each token."""
        return

    def build_heads(self, ops: OpBinding) -> None:
        """Build the projections of the pooled state."""
        hidden, rows = self.shape.hidden_size, self.table["classifier.weight"].shape[0]
        if "pooler.weight" in self.table:
            self.pooler = Linear(hidden, hidden, ops)
        self.classifier = Linear(hidden, rows, ops, bias="classifier.bias" in self.table)

    @property
    def head_modules(self) -> dict[str, nn.Module]:
        """Modules of the head by attribute name."""
        return self.present("pooler", "classifier")

    def loss(self, **batch: Tensor) -> Tensor:
        """Return the loss, and in evaluation the weight of the samples predicted right.

        The loss of a regression is the squared error, and nothing is counted.

        Args:
            batch: Tensors by the names of the family's batch: `Body.inputs`, then

                - pooled_B: position of the token whose hidden state is pooled;
                - label_Q: class, number of the right choice, or the number of a regression;
                - label_weight_Q: weight of each sample in the loss; 0: it only fills the batch;
                - choices_QC: True for a choice that the question has; multiple choice only.
        """
        return self.run_stage(None, batch, self.layers, last=True)

    def predictions(self, **batch: Tensor) -> Tensor:
        """Return the logits of classes or choices, [Q, L] or [Q, C]; of a regression numbers, [Q].

        Args:
            batch: Tensors of `loss`, without the labels and their weights.
        """
        return self.run_stage(None, batch, self.layers, last=True)

    def losses_of(self, hidden_BSH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of hidden states after the last norm; without labels, `predictions`."""
        logits_BL = self.task_logits(hidden_BSH, batch["pooled_B"])
        logits_QL = logits_BL.to(torch.promote_types(logits_BL.dtype, torch.float32))
        if self.shape.task == CHOICE:
            choices_QC = batch["choices_QC"]
            lowest = torch.finfo(logits_QL.dtype).min
            logits_QL = logits_QL.view(choices_QC.shape).masked_fill(~choices_QC, lowest)
        if self.shape.task == REGRESSION:
            logits_QL = logits_QL.squeeze(-1)
        if "label_Q" not in batch:
            return logits_QL
        label_Q, weight_Q = batch["label_Q"], batch["label_weight_Q"]
        if self.shape.task == REGRESSION:
            return ((logits_QL - label_Q).square() * weight_Q).sum()
        each_Q = functional.cross_entropy(logits_QL, label_Q, reduction="none")
        loss = (each_Q * weight_Q).sum()
        if self.training:
            return loss
        right = ((logits_QL.argmax(-1) == label_Q) * weight_Q).sum()
        return torch.stack([loss, right])

    def task_logits(self, hidden_BSH: Tensor, pooled_B: Tensor) -> Tensor:
        """Return the logits of each sequence, [B, L].

        Args:
            hidden_BSH: Hidden states after the last norm.
            pooled_B: Position of the token that is pooled.
        """
        index_B1H = pooled_B[:, None, None].expand(-1, 1, hidden_BSH.shape[-1])
        x_BH = hidden_BSH.gather(1, index_B1H).squeeze(1)
        if "pooler" in self._modules:
            x_BH = torch.tanh(self.pooler(x_BH))
        x_BH = functional.dropout(x_BH, self.shape.hidden_dropout, self.training)
        return self.classifier(x_BH)  # type: ignore[no-any-return]

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the plan of the layers, with a head that every rank computes whole."""
        plan = super().tensor_parallel_plan()
        return dataclasses.replace(plan, whole_heads=[self.classifier] if self.part.head else [])


@functools.cache
def head_model(base: type[Model]) -> Any:
    """Return the class of models with the layers of *base* and a head for a task."""
    return type(f"{base.__name__}WithHead", (TaskHead, base), {"__module__": __name__})
