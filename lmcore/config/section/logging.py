"""What is written about a run, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class LoggingSection:
    """Progress, metrics and TensorBoard."""

    name: str = option("gpt", "Name of the run, part of its default directory.")
    log_interval: int = option(10, "Steps between training lines.", minimum=1)
    progress: str = option(
        "auto",
        "Live display on a terminal, or plain lines.",
        choices=("auto", "live", "plain", "none"),
    )
    tensorboard: bool = option(True, "Write TensorBoard events.")
    tensorboard_dir: str | None = option(
        None,
        "Directory of TensorBoard events; default: tensorboard/ in the run directory.",
        metavar="DIR",
    )
    tensorboard_log_interval: int = option(1, "Steps between TensorBoard events.", minimum=1)
    tensorboard_queue_size: int = option(
        1000, "TensorBoard events held before they are written.", minimum=1
    )
