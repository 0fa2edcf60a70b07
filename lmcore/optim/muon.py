"""Muon for the layers' matrices, by torch's own class; AdamW for embeddings and vectors.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the size
of an update as in Liu et al., "Muon is Scalable for LLM Training" (2025), so that learning rate and
weight decay of AdamW suit both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lmcore.optim.adamw import AdamW
from lmcore.optim.optimizer import Optimizer, split_matrices

__all__ = ["Muon"]


class Muon(Optimizer):
    """weight -= lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(momentum), decay decoupled.

    The joint matrix of queries, keys and values is orthogonalized as one.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        update: Callable[..., None],
        *,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        num_iterations: int,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        """Create torch's Muon for the matrices and AdamW for the other parameters.

        Args:
            named_parameters: Names and parameters to train.
            update: Bound `adamw` op.
            weight_decay: Weight decay of matrices and embeddings.
            momentum: Momentum of the gradients that are orthogonalized.
            nesterov: True for Nesterov momentum.
            num_iterations: Number of Newton-Schulz iterations, in bfloat16.
            betas: Decay of AdamW's first and second moment.
            epsilon: Epsilon of AdamW.
        """
        matrices, others = split_matrices(named_parameters, weight_decay)
        super().__init__((*matrices, *others))
        self.others = AdamW(others, update, betas=betas, epsilon=epsilon)
        self._matrices = [matrix for group in matrices for matrix in group.parameters]
        names = [name for group in matrices for name in group.names]
        buffers = [
            torch.zeros_like(matrix, memory_format=torch.preserve_format).detach()
            for matrix in self._matrices
        ]
        self._state["momentum_buffer"] = dict(zip(names, buffers, strict=True))
        self._muon = None
        if self._matrices:
            self._muon = torch.optim.Muon(
                self._matrices,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=num_iterations,
                adjust_lr_fn="match_rms_adamw",
            )
            for parameter, buffer in zip(self._matrices, buffers, strict=True):
                self._muon.state[parameter]["momentum_buffer"] = buffer

    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        if self._muon is not None:
            for group in self._muon.param_groups:
                group["lr"] = lr
            self._muon.step()
        self.others.step(lr)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state of both optimizers by name."""
        return super().state_tensors() | self.others.state_tensors()
