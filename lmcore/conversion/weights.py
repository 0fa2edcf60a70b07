"""Weights of a checkpoint for a model that takes no state of an optimizer."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from lmcore.conversion.formats import read_state
from lmcore.conversion.state import ModelState
from lmcore.errors import CheckpointError

__all__ = ["WeightReader"]

logger = logging.getLogger(__name__)


class WeightReader:
    """Weights of a checkpoint of any format, in the highest precision that it has.

    Optimizers keep weights in float32 beside the model's own.  If these do not fit the model, the
    model's own are taken, with a warning.

    Attributes:
        state: State that is read.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Open the checkpoint.

        Args:
            path: Directory of the checkpoint.
            name: Name of its format; None: recognized by its files.

        Raises:
            CheckpointError: There is no checkpoint of a known format, or it is damaged.
        """
        self._path, self._name, self._tried = path, name, False
        self.state: ModelState
        try:
            self.state = read_state(path, name)
        except CheckpointError as error:
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
        except CheckpointError as error:
            if self._tried:
                raise
            self.state = self._without_optimizer(error)
            return self.state.read(name)

    def _without_optimizer(self, error: CheckpointError) -> ModelState:
        self._tried = True
        state = read_state(self._path, self._name, weights_only=True)
        logger.warning("%s; the weights of the model itself are taken", error.what_and_why)
        return state
