"""Weights of a checkpoint for a model that takes no state of an optimizer."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from lmcore.conversion.formats import read_state
from lmcore.conversion.state import ModelState, OptimizerStateError

__all__ = ["WeightReader"]

logger = logging.getLogger(__name__)


class WeightReader:
    """Weights of a checkpoint of any format, in the highest precision that it has.

    Optimizers keep weights in float32 beside the model's own.  If these do not fit the model, or
    the state of the optimizer is not complete, the model's own are taken, with a warning.  Missing
    and damaged files are errors.

    Attributes:
        state: State that is read.
    """

    def __init__(self, path: Path, name: str | None = None, *, compare: bool = True) -> None:
        """Open the checkpoint.

        Args:
            path: Directory of the checkpoint.
            name: Name of its format; None: recognized by its files.
            compare: True to compare the checksums of files that are read; False for a reader that
                only describes the checkpoint.

        Raises:
            CheckpointError: There is no checkpoint of a known format, or it is damaged.
        """
        self._path, self._name, self._compare = path, name, compare
        self.state: ModelState
        try:
            self.state = read_state(path, name, compare=compare)
        except OptimizerStateError as error:
            self.state = self._without_optimizer(error)

    def read(self, name: str) -> Tensor:
        """Return a whole weight, on the CPU.

        Args:
            name: Name of the parameter in lmcore.

        Raises:
            CheckpointError: The file is damaged.
        """
        try:
            return self.state.read(name)
        except OptimizerStateError as error:
            self.state = self._without_optimizer(error)
            return self.state.read(name)

    def _without_optimizer(self, error: OptimizerStateError) -> ModelState:
        state = read_state(self._path, self._name, weights_only=True, compare=self._compare)
        logger.warning("%s; the weights of the model itself are taken", error.what_and_why)
        return state
