"""CodeCarbon: energy and carbon dioxide of the machine of rank 0, by its offline tracker."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from lmcore.base.errors import MissingPackageError
from lmcore.model.run_logger import LoggedRun, OpenLogger, StepMetrics

__all__ = ["CarbonLogger", "open_codecarbon"]

_FLUSH_SECONDS = 600.0


def open_codecarbon(run: LoggedRun) -> CarbonLogger:
    """Start the tracker of `--codecarbon-dir`.

    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        from codecarbon import OfflineEmissionsTracker
    except ImportError:
        raise MissingPackageError(
            "codecarbon",
            needed_for="`--codecarbon-dir`",
            install="pip install 'lmcore[codecarbon]'",
        ) from None
    settings = run.config.logging
    directory = Path(settings.codecarbon_dir)
    directory.mkdir(parents=True, exist_ok=True)
    logging.getLogger("codecarbon").setLevel(logging.ERROR)  # it would describe the machine
    country = settings.codecarbon_country
    tracker = OfflineEmissionsTracker(
        project_name=run.name,
        output_dir=str(directory),
        log_level="error",
        allow_multiple_runs=True,
        **({} if country is None else {"country_iso_code": country.upper()}),
    )
    tracker.start()
    return CarbonLogger(tracker)


class CarbonLogger(OpenLogger):
    """Tracker that measures by itself; it appends to `emissions.csv` now and then, and at the end.

    CodeCarbon logs its own failures instead of raising them, so that a number may be missing.
    """

    def __init__(self, tracker: Any) -> None:
        """Measure from now on.

        Args:
            tracker: Tracker that was started.
        """
        self._tracker = tracker
        self._flushed_at = time.monotonic()

    def log(self, metrics: StepMetrics) -> None:
        """Write what was measured so far, every ten minutes, for a run that may be killed."""
        del metrics
        if time.monotonic() >= self._flushed_at + _FLUSH_SECONDS:
            self._tracker.flush()
            self._flushed_at = time.monotonic()

    def close(self, status: str) -> dict[str, float]:
        """Stop the tracker; return energy in kWh and carbon dioxide in kg of this session."""
        del status
        emissions = self._tracker.stop()
        if emissions is None:
            raise RuntimeError("the tracker could not measure")
        data = self._tracker.final_emissions_data
        return {"energy_kwh": float(data.energy_consumed), "co2_kg": float(emissions)}
