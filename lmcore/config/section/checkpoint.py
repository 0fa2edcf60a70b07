"""Section `checkpoint`: saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import RESUMES, Need, setting
from lmcore.config.option import FREE, INPUT_PATH, OUTPUT_PATH, option

_LOAD = setting("--load")
_KEEP_LAST = setting("--keep-last")
_BY_STEPS = setting("--save-interval").else_error("checkpoints by time are of any step")
_VALIDATES = Need(
    "`--eval-interval` and `--eval-iters` above 0",
    lambda run: run.config.training.eval_interval > 0 and run.config.training.eval_iters > 0,
    refused="the run has no validation loss",
)
_RESUME = Need(RESUMES, lambda run: not run.config.checkpoint.finetune)


@dataclass(frozen=True)
class CheckpointSection:
    """Run directory, checkpoints to save and the checkpoint to load."""

    save: str | None = option(
        None,
        "Run directory; default: runs/<date>-<name>.",
        metavar="DIR",
        on_resume=FREE,
        paths=OUTPUT_PATH,
        one_start=True,
    )
    load: str | None = option(
        None,
        "Checkpoint to continue from: a run directory, its `checkpoints`, or one `iter_XXXXXXX`. "
        "Or the directory of another program, such as Hugging Face or Megatron: weights, shape and "
        "tokenizer, and with the state of Adam also step and samples, where the run continues.",
        metavar="DIR",
        on_resume=FREE,
        paths=INPUT_PATH,
        one_start=True,
    )
    ckpt_step: str | None = option(
        None,
        "Step of the checkpoint to load instead of the newest, or `best`: the one of lowest "
        "validation loss that --save-best marked.",
        metavar="STEP",
        on_resume=FREE,
        needs=_LOAD.else_error("it chooses among the checkpoints of that directory"),
        one_start=True,
    )
    use_checkpoint_args: bool = option(
        False,
        "Take the settings of model and tokenizer, and the precision, from the checkpoint of "
        "--load; files and flags override them.",
        on_resume=FREE,
        needs=_LOAD.else_error("it takes settings from that checkpoint"),
        one_start=True,
    )
    save_interval: int | None = option(
        None,
        "Steps between checkpoints, all of which are kept; default: none by steps.",
        minimum=1,
        on_resume=FREE,
    )
    save_interval_mins: float = option(
        10.0,
        "Save every N minutes; of these checkpoints only the two newest are kept (see "
        "--keep-last); 0: never.",
        minimum=0,
        on_resume=FREE,
    )
    keep_last: int | None = option(
        None,
        "Number of checkpoints to keep: a save first deletes checkpoints of --save-interval-mins, "
        "then the oldest; default: the newest two, and all of --save-interval.",
        minimum=1,
        on_resume=FREE,
    )
    keep_every: int | None = option(
        None,
        "Keep the checkpoint of every Nth step besides --keep-last; a multiple of --save-interval.",
        minimum=1,
        on_resume=FREE,
        needs=(_KEEP_LAST, _BY_STEPS),
    )
    save_best: bool = option(
        False,
        "Save a checkpoint at each validation with the lowest loss so far, and keep the best one; "
        "`--ckpt-step best` loads it.",
        on_resume=FREE,
        needs=_VALIDATES,
    )
    async_save: bool = option(
        False,
        "Write intermediate checkpoints in the background.",
        on_resume=FREE,
    )
    save_final: bool = option(
        True,
        "Save a checkpoint when the run ends or is stopped; off, for benchmarks: only the "
        "checkpoints of --save-interval, --save-interval-mins and --save-best are saved.",
        on_resume=FREE,
    )
    save_optim: bool = option(True, "Save the optimizer's state.", on_resume=FREE)
    save_rng: bool = option(True, "Save the random number states.", on_resume=FREE)
    load_optim: bool = option(
        True, "Load the optimizer's state.", on_resume=FREE, needs=(_LOAD, _RESUME), one_start=True
    )
    load_rng: bool = option(
        True,
        "Load the random number states.",
        on_resume=FREE,
        needs=(_LOAD, _RESUME),
        one_start=True,
    )
    finetune: bool = option(
        False,
        "Load only the weights; step, optimizer state, schedule and data start from the beginning.",
        on_resume=FREE,
        needs=_LOAD.else_error("fine-tuning starts from a checkpoint's weights"),
        one_start=True,
    )
    exit_on_missing_checkpoint: bool = option(
        True,
        "Stop if --load has no checkpoint; off, or if --save names the same directory: start from "
        "initial weights, with a warning.",
        on_resume=FREE,
        needs=_LOAD,
    )
    schedule: str | None = option(
        None,
        "Learning-rate schedule of a run whose length or schedule differs from the checkpoint's: "
        "extend: that of a run of the new length from its first step; keep: the checkpoint's; "
        "restart: a new warm-up and decay over the remaining steps.",
        choices=("extend", "keep", "restart"),
        on_resume=FREE,
        needs=(_LOAD, _RESUME),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Megatron's --schedule keep: continue with the checkpoint's learning-rate schedule.",
        on_resume=FREE,
        needs=(_LOAD, _RESUME),
    )
    override_opt_param_scheduler: bool = option(
        False,
        "Continue with the learning-rate schedule of this run's settings, as they are, even if the "
        "checkpoint's differs.",
        on_resume=FREE,
        needs=(_LOAD, _RESUME),
        one_start=True,
    )
    change_blend: bool = option(
        False,
        "Continue with this run's data sources and weights; each source continues at the position "
        "in the checkpoint.",
        on_resume=FREE,
        needs=_LOAD.else_error("the checkpoint records how much of each source was read"),
        one_start=True,
    )
    override_data_order: bool = option(
        False,
        "Continue even if the order of the training samples differs from the checkpoint's.",
        on_resume=FREE,
        needs=(_LOAD, _RESUME),
        one_start=True,
    )
    change_tokenizer: bool = option(
        False,
        "Continue or fine-tune with a tokenizer other than the checkpoint's: its token ids select "
        "embedding rows that were trained for other tokens.",
        on_resume=FREE,
        needs=_LOAD,
        one_start=True,
    )
