"""Section `logging`: progress, metrics, and loggers such as TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need, setting
from lmcore.config.option import FREE, OUTPUT_PATH, option
from lmcore.model.run_logger import run_loggers

_TENSORBOARD = setting("--tensorboard")
_LOGGER = Need(
    "a logger, such as `--tensorboard`",
    lambda run: any(one.wanted(run.config) for one in run_loggers().values()),
)
_OF_PARTS = "another engine divides parameters and gradients by itself"
_NATIVE = setting("--engine", "native").else_error(_OF_PARTS)
_WANDB = setting("--wandb-project")
_MLFLOW = setting("--mlflow-experiment")
_OWN_DIRECTORY = Need(
    "a run directory without `--save`",
    lambda run: run.config.checkpoint.save is None,
    ignored="only names the default run directory",
)


@dataclass(frozen=True)
class LoggingSection:
    """Progress, metrics, TensorBoard and other loggers."""

    name: str | None = option(
        None,
        "Name of the run, used in the default run directory; default: the family of the model.",
        on_resume=FREE,
        needs=_OWN_DIRECTORY,
    )
    log_interval: int = option(10, "Steps between progress lines.", minimum=1, on_resume=FREE)
    log_params_norm: bool = option(
        False,
        "Record the Euclidean norm of all parameters after each step.",
        on_resume=FREE,
        needs=_NATIVE,
    )
    log_num_zeros_in_grad: bool = option(
        False,
        "Record how many elements of the gradients are zero in each step.",
        on_resume=FREE,
        needs=_NATIVE,
    )
    log_memory_to_tensorboard: bool = option(
        False,
        "Record the device memory of rank 0 after each step, on devices whose plugin tells it.",
        on_resume=FREE,
    )
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
        1,
        "Steps between rows of TensorBoard and the other loggers.",
        minimum=1,
        on_resume=FREE,
        needs=_LOGGER,
    )
    tensorboard_tags: str = option(
        "lmcore",
        "Names of the numbers at TensorBoard and the other loggers: lmcore's, or Megatron-LM's, "
        "such as `lm loss` and, at TensorBoard, `learning-rate vs samples`.",
        choices=("lmcore", "megatron"),
        on_resume=FREE,
        needs=_LOGGER,
    )
    tensorboard_queue_size: int = option(
        1000,
        "TensorBoard events queued before they are written.",
        minimum=1,
        on_resume=FREE,
        needs=_TENSORBOARD,
    )
    wandb_project: str | None = option(
        None,
        "Project of Weights & Biases that the run is logged to (of `lmcore[wandb]`); "
        "`WANDB_MODE=offline` logs to files.",
        on_resume=FREE,
    )
    wandb_entity: str | None = option(
        None,
        "User or team of the Weights & Biases project; default: the account's own.",
        on_resume=FREE,
        needs=_WANDB,
    )
    wandb_exp_name: str | None = option(
        None,
        "Name of the run at Weights & Biases; default: the name of the run directory.",
        on_resume=FREE,
        needs=_WANDB,
    )
    wandb_save_dir: str | None = option(
        None,
        "Directory of Weights & Biases' local files; default: the run directory.",
        metavar="DIR",
        on_resume=FREE,
        needs=_WANDB,
        paths=OUTPUT_PATH,
    )
    mlflow_experiment: str | None = option(
        None,
        "Experiment of MLflow that the run is logged to (of `lmcore[mlflow]`).",
        on_resume=FREE,
    )
    mlflow_tracking_uri: str | None = option(
        None,
        "MLflow server or store; default: `MLFLOW_TRACKING_URI`, else mlflow.db in the run "
        "directory.",
        metavar="URI",
        on_resume=FREE,
        needs=_MLFLOW,
    )
    codecarbon_dir: str | None = option(
        None,
        "Directory of CodeCarbon's emissions.csv, with energy in kWh and CO2 in kg (of "
        "`lmcore[codecarbon]`).",
        metavar="DIR",
        on_resume=FREE,
        paths=OUTPUT_PATH,
    )
    codecarbon_country: str | None = option(
        None,
        "Country whose electricity CodeCarbon assumes, by three letters such as FRA; default: the "
        "mean of the world.",
        on_resume=FREE,
        needs=setting("--codecarbon-dir"),
    )
