"""Weights & Biases, online or offline as its own settings and `WANDB_MODE` say."""

from __future__ import annotations

import os
from typing import Any

from lmcore.base.errors import ConfigError, MissingPackageError
from lmcore.model.run_logger import LoggedRun, OpenLogger, StepMetrics

__all__ = ["WandbLogger", "open_wandb"]

_STEP, _SAMPLES = "step", "samples"
_WITHOUT_SERVER = frozenset({"offline", "disabled", "dryrun", "shared-offline"})


def open_wandb(run: LoggedRun) -> WandbLogger:
    """Return the run of `--wandb-project`: a new one, or the one that a continued run had.

    Raises:
        MissingPackageError: The package is not installed.
        ConfigError: No API key is known; the package would ask for one on a terminal.
    """
    try:
        import wandb
    except ImportError:
        raise MissingPackageError(
            "wandb", needed_for="`--wandb-project`", install="pip install 'lmcore[wandb]'"
        ) from None
    settings = run.config.logging
    online = os.environ.get("WANDB_MODE", "online").lower() not in _WITHOUT_SERVER
    if online and not wandb.api.api_key:
        raise ConfigError(
            "no API key for Weights & Biases",
            hint="run `wandb login`, or set `WANDB_MODE=offline` and send the run later by "
            "`wandb sync`",
        )
    directory = settings.wandb_save_dir or str(run.directory)
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - it would take another in silence
    opened = wandb.init(
        project=settings.wandb_project,
        entity=settings.wandb_entity,
        name=settings.wandb_exp_name or run.name,
        dir=directory,
        id=run.run_id,
        resume="allow",
        config=dict(run.settings),
        settings=wandb.Settings(console="off", quiet=True),
    )
    return WandbLogger(opened)


class WandbLogger(OpenLogger):
    """Run of Weights & Biases; the horizontal axis is the number `step`, as steps may come again.

    A run that is continued from its last checkpoint repeats the steps after it, and W&B's own
    counter cannot go back.
    """

    def __init__(self, run: Any) -> None:
        """Log to an open run of the package."""
        self._run = run
        self.run_id = run.id
        run.define_metric(_STEP)
        run.define_metric(_SAMPLES)
        run.define_metric("*", step_metric=_STEP)

    def log(self, metrics: StepMetrics) -> None:
        """Log the numbers of a step."""
        position = {_STEP: metrics.step, _SAMPLES: metrics.samples}
        self._run.log({**metrics.values, **position})

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text as HTML-escaped markup, the form that the page shows."""
        import html

        import wandb

        shown = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({name: shown, _STEP: step})

    def close(self, status: str) -> dict[str, float]:
        """End the run; one that was stopped early is no failure."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))
        return {}
