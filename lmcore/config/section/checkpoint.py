"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class CheckpointSection:
    """The run directory and what is saved to, and restored from, it."""

    save: str | None = option(None, "Run directory; default: runs/<date>-<name>.", metavar="DIR")
    load: str | None = option(
        None,
        "Run directory, its `checkpoints`, or one `iter_XXXXXXX`, to continue from.",
        metavar="DIR",
    )
    save_interval: int | None = option(
        None, "Steps between checkpoints; default: only at the end.", minimum=1
    )
    keep_last: int | None = option(
        None, "Checkpoints kept, older ones are deleted after a save; default: all.", minimum=1
    )
    async_save: bool = option(
        False, "Write the checkpoints of --save-interval while training goes on."
    )
    save_optim: bool = option(True, "Save the optimizer's state.")
    save_rng: bool = option(True, "Save the random states.")
    load_optim: bool = option(True, "Load the optimizer's state.")
    load_rng: bool = option(True, "Load the random states.")
    finetune: bool = option(
        False,
        "Load only the weights; step, optimizer state, schedule and data start from the beginning.",
    )
    exit_on_missing_checkpoint: bool = option(
        True,
        "Stop if --load has no checkpoint; off, or if --save names the same directory: start from "
        "initial weights, with a warning.",
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "Continue with the checkpoint's learning-rate schedule."
    )
    override_opt_param_scheduler: bool = option(
        False, "Continue with this run's learning-rate schedule, though the checkpoint's differs."
    )
    change_blend: bool = option(
        False,
        "Continue with this run's data sources and weights, each source from where the checkpoint "
        "left it.",
    )
    override_data_order: bool = option(
        False, "Continue though the training samples come in another order than the checkpoint's."
    )
