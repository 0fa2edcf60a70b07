"""MLflow, at a tracking server or in local files."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from lmcore.base.errors import MissingPackageError
from lmcore.model.run_logger import LoggedRun, OpenLogger, StepMetrics

__all__ = ["MlflowLogger", "open_mlflow"]

_LONGEST_VALUE = 500
"""Characters of a setting that MLflow keeps at least."""
_MOST_AT_ONCE = 100


def open_mlflow(run: LoggedRun) -> MlflowLogger:
    """Return the run of `--mlflow-experiment`: a new one, or the one that a continued run had.

    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise MissingPackageError(
            "mlflow", needed_for="`--mlflow-experiment`", install="pip install 'lmcore[mlflow]'"
        ) from None
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it would describe its tables
    settings = run.config.logging
    place = settings.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not place:
        place = f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
    client = MlflowClient(tracking_uri=place)
    run_id = run.run_id
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
        return MlflowLogger(client, run_id)
    name = settings.mlflow_experiment
    known = client.get_experiment_by_name(name)
    artifacts = None
    if place.startswith("sqlite:"):
        artifacts = (run.directory / "mlflow-artifacts").resolve().as_uri()
    experiment = (
        known.experiment_id
        if known is not None
        else client.create_experiment(name, artifact_location=artifacts)
    )
    made = client.create_run(experiment, run_name=run.name)
    logger = MlflowLogger(client, made.info.run_id)
    logger.settings(run.settings)
    return logger


class MlflowLogger(OpenLogger):
    """Run of MLflow, by a client, without global state."""

    def __init__(self, client: Any, run_id: str) -> None:
        """Log to an open run.

        Args:
            client: MLflow's client.
            run_id: Identity of the run.
        """
        self._client = client
        self.run_id: str = run_id

    def settings(self, settings: Any) -> None:
        """Log the settings of the run as parameters, if they are set."""
        from mlflow.entities import Param

        pairs = [
            (f"{section}.{name}", value if isinstance(value, str) else json.dumps(value))
            for section, values in settings.items()
            for name, value in (values.items() if isinstance(values, dict) else ())
            if value is not None
        ]
        params = [Param(name, text[:_LONGEST_VALUE]) for name, text in pairs]
        for begin in range(0, len(params), _MOST_AT_ONCE):
            chunk = params[begin : begin + _MOST_AT_ONCE]
            self._client.log_batch(self.run_id, params=chunk)

    def log(self, metrics: StepMetrics) -> None:
        """Log the numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, one, now, metrics.step) for name, one in metrics.values.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text as a file among the run's artifacts."""
        self._client.log_text(self.run_id, text, f"{name}-{step}.txt")

    def close(self, status: str) -> dict[str, float]:
        """End the run as finished, failed or stopped."""
        ended = {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_tag(self.run_id, "status", status)
        self._client.set_terminated(self.run_id, status=ended)
        return {}
