"""Section `logging`: progress, metrics and TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need, setting
from lmcore.config.option import FREE, OUTPUT_PATH, option

_TENSORBOARD = setting("--tensorboard")
_OWN_DIRECTORY = Need(
    "a run directory without `--save`",
    lambda run: run.config.checkpoint.save is None,
    ignored="only names the default run directory",
)


@dataclass(frozen=True)
class LoggingSection:
    """Progress, metrics and TensorBoard."""

    name: str | None = option(
        None,
        "Name of the run, used in the default run directory; default: the family of the model.",
        on_resume=FREE,
        needs=_OWN_DIRECTORY,
    )
    log_interval: int = option(10, "Steps between progress lines.", minimum=1, on_resume=FREE)
    progress: str = option(
        "auto",
        "Progress display: live, plain lines, or none; auto: live on a terminal, else plain.",
        choices=("auto", "live", "plain", "none"),
        on_resume=FREE,
    )
    tensorboard: bool = option(True, "Write TensorBoard events.", on_resume=FREE)
    tensorboard_dir: str | None = option(
        None,
        "Directory of TensorBoard events; default: tensorboard/ in the run directory.",
        metavar="DIR",
        on_resume=FREE,
        needs=_TENSORBOARD,
        paths=OUTPUT_PATH,
    )
    tensorboard_log_interval: int = option(
        1, "Steps between TensorBoard events.", minimum=1, on_resume=FREE, needs=_TENSORBOARD
    )
    tensorboard_tags: str = option(
        "lmcore",
        "Names of TensorBoard's scalars: lmcore's, or Megatron-LM's, such as `lm loss` and "
        "`learning-rate vs samples`.",
        choices=("lmcore", "megatron"),
        on_resume=FREE,
        needs=_TENSORBOARD,
    )
    tensorboard_queue_size: int = option(
        1000,
        "TensorBoard events queued before they are written.",
        minimum=1,
        on_resume=FREE,
        needs=_TENSORBOARD,
    )
