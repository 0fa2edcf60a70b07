"""Shampoo for the layers' matrices, grafted to Adam; AdamW for embeddings and vectors.

Source: Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018), in the form
of Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo
Optimizer" (2023): blocks of bounded size, averages instead of sums, Adam's step size.  Packages
with Shampoo keep one preconditioner for each whole dimension, without grafting, or create their
state at the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmcore.optim.adamw import AdamW
from lmcore.optim.optimizer import Optimizer, raise_counts, split_matrices

__all__ = ["Shampoo", "inverse_root"]

_LEAST_NORM = 1e-16


def inverse_root(matrix: Tensor, epsilon: float) -> Tensor:
    """Return (matrix + epsilon)^(-1/4) of a symmetric positive semidefinite *matrix*.

    Negative eigenvalues, which are due to rounding, are raised to epsilon with all others.
    """
    values, vectors = torch.linalg.eigh(matrix)
    lifted = values - values.min().clamp(max=0.0) + epsilon
    root: Tensor = (vectors * lifted.pow(-0.25)) @ vectors.T
    return root


@dataclass(frozen=True)
class _Block:
    """Statistics of a block of a matrix, and their inverse fourth roots."""

    rows: slice
    columns: slice
    left: Tensor
    right: Tensor
    left_root: Tensor
    right_root: Tensor


class Shampoo(Optimizer):
    """weight -= lr * (P * |a| / |P| + decay * weight); P = L^-1/4 m R^-1/4, a = Adam's direction.

    L and R are averages of G G^T and G^T G.  Their roots are computed every `frequency` steps;
    before the first time the direction is Adam's.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        update: Callable[..., None],
        *,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        root_epsilon: float,
        block_size: int,
        frequency: int,
    ) -> None:
        """Allocate moments and statistics.

        Args:
            named_parameters: Names and parameters to train.
            update: Bound `adamw` op.
            weight_decay: Weight decay of matrices and embeddings.
            betas: Decay of the momentum, and of the statistics and Adam's second moment.
            epsilon: Epsilon of Adam.
            root_epsilon: Number added to the statistics before their root.
            block_size: Largest side of a block with its own statistics.
            frequency: Number of steps from one computation of the roots to the next.
        """
        matrices, others = split_matrices(named_parameters, weight_decay)
        super().__init__(matrices)
        self.others = AdamW(others, update, betas=betas, epsilon=epsilon)
        self.beta1, self.beta2 = betas
        self.epsilon, self.root_epsilon = epsilon, root_epsilon
        self.block_size, self.frequency = block_size, frequency
        self._first = self._moments("exp_avg")
        self._second = self._moments("exp_avg_sq")
        self._steps = self._scalars("step")
        self._blocks = [
            [
                list(self._new_blocks(name, parameter.detach()))
                for name, parameter in zip(group.names, group.parameters, strict=True)
            ]
            for group in matrices
        ]
        self.groups = (*matrices, *others)

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        """Update every parameter from its gradient; all must have one."""
        for index, blocks_of in enumerate(self._blocks):
            group = self.groups[index]
            first, second = self._first[index], self._second[index]
            count = raise_counts(self._steps[index])
            gradients = group.gradients()
            torch._foreach_lerp_(first, gradients, 1 - self.beta1)
            torch._foreach_mul_(second, self.beta2)
            torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
            weights = zip(group.parameters, gradients, first, second, blocks_of, strict=True)
            for weight, gradient, average, square, blocks in weights:
                momentum = average / (1 - self.beta1**count)
                root = (square / (1 - self.beta2**count)).sqrt_().add_(self.epsilon)
                direction = momentum / root
                for block in blocks:
                    self._count_in(block, gradient[block.rows, block.columns], count)
                    self._precondition(block, momentum, direction, count)
                if group.weight_decay:
                    direction.add_(weight, alpha=group.weight_decay)
                weight.add_(direction, alpha=-lr)
        self.others.step(lr)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state of matrices and of other parameters by name."""
        found = super().state_tensors()
        for name, tensor in self.others.state_tensors().items():
            assert name not in found, "a parameter is in both halves"
            found[name] = tensor
        return found

    def _new_blocks(self, name: str, weight: Tensor) -> Iterator[_Block]:
        for row, rows in enumerate(self._slices(weight.shape[0])):
            for column, columns in enumerate(self._slices(weight.shape[1])):
                made: dict[str, Tensor] = {}
                for side, span in (("left", rows), ("right", columns)):
                    size = span.stop - span.start
                    for kind in (side, f"{side}_root"):
                        made[kind] = weight.new_zeros(size, size)
                        self._state.setdefault(f"{kind}_{row}_{column}", {})[name] = made[kind]
                yield _Block(rows, columns, **made)

    def _slices(self, size: int) -> list[slice]:
        return [
            slice(at, min(at + self.block_size, size)) for at in range(0, size, self.block_size)
        ]

    def _count_in(self, block: _Block, gradient: Tensor, count: int) -> None:
        """Update the block's statistics with *gradient*; compute the roots if they are due."""
        block.left.lerp_(gradient @ gradient.T, 1 - self.beta2)
        block.right.lerp_(gradient.T @ gradient, 1 - self.beta2)
        if count % self.frequency == 0:
            scale = 1 - self.beta2**count
            block.left_root.copy_(inverse_root(block.left / scale, self.root_epsilon))
            block.right_root.copy_(inverse_root(block.right / scale, self.root_epsilon))

    def _precondition(self, block: _Block, momentum: Tensor, direction: Tensor, count: int) -> None:
        """Precondition the block of Adam's *direction*, keeping its norm."""
        if count < self.frequency:
            return
        part = direction[block.rows, block.columns]
        turned = block.left_root @ momentum[block.rows, block.columns] @ block.right_root
        part.copy_(turned * (part.norm() / turned.norm().clamp(min=_LEAST_NORM)))
