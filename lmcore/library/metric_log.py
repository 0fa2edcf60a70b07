"""`MetricLog`: the method `log` of a session, and the loggers that its arguments name."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.logger.run_loggers import RunLoggers

__all__ = ["MetricLog"]

logger = logging.getLogger(__name__)


class MetricLog:
    """Loggers of a session: `rt.log({"loss": 0.5})`."""

    _config: Config
    _loggers: RunLoggers | None = None

    @property
    def rank(self) -> int:
        """Rank of this process, from 0 on."""
        raise NotImplementedError

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def updates(self) -> int:
        """Number of updates of weights."""
        raise NotImplementedError

    def _require_open(self, name: str) -> None:
        raise NotImplementedError

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Log numbers to the loggers of `lmcore.start`: its `tensorboard_dir`, `wandb_project`, ...

        Rank 0 logs; a logger that fails is named in one warning.  A number on another device than
        the host is waited for.

        Args:
            values: Numbers or tensors of one element, and texts, by name.
            step: Position on the horizontal axis; None: the number of updates so far.

        Raises:
            ConfigError: A value is neither, or the step is no integer of 0 or more.
        """
        self._require_open("log")
        position: Any = self.updates if step is None else step
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ConfigError(f"`log(step={step!r:.100})`: expected an integer of 0 or more")
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"`log` of {type(values).__name__}",
                why="expected numbers and texts by name",
                hint='`rt.log({"loss": loss})`',
            )
        texts = {str(name): one for name, one in values.items() if isinstance(one, str)}
        numbers = {
            str(name): _number(name, one)
            for name, one in values.items()
            if not isinstance(one, str) and self.is_main
        }
        if not self.is_main:
            return
        from lmcore.model.run_logger import StepMetrics

        if self._loggers is None:
            self._loggers = self._open_loggers()
        self._loggers.log(StepMetrics(position, position, numbers))
        for name, text in texts.items():
            self._loggers.text(name, text, position)

    def _open_loggers(self) -> RunLoggers:
        from lmcore.logger.run_loggers import RunLoggers
        from lmcore.model.run_logger import LoggedRun

        settings = self._config.logging
        own = dataclasses.replace(settings, tensorboard=settings.tensorboard_dir is not None)
        config = dataclasses.replace(self._config, logging=own)
        folder = Path(settings.tensorboard_dir or os.curdir)
        opened = RunLoggers(LoggedRun(folder, folder.resolve().name, config), keep_ids=False)
        if not len(opened):
            logger.warning(
                "`rt.log` logs nothing: give `lmcore.start` `tensorboard_dir`, `wandb_project`, "
                "`mlflow_experiment` or `codecarbon_dir`"
            )
        return opened

    def _close_loggers(self, status: str) -> None:
        """Close the loggers, if any was opened."""
        if self._loggers is not None:
            self._loggers.close(status)


def _number(name: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(
            f"`log`: `{name}` is {value!r:.100}",
            why="expected a number, a tensor of one element, or text",
        ) from cause
