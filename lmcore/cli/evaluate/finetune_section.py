"""Options of `lmcore evaluate --finetune`."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option

__all__ = ["ONLY_FINETUNE", "FinetuneOptions"]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Training of a head for a task, before the evaluation."""

    finetune: bool = option(
        False,
        "Train a head for the task on its training files, and score the best checkpoint; flags of "
        "`lmcore train` follow after `--`.",
    )
    save: str | None = option(
        None, "Directory of the fine-tuned runs and their results.", metavar="DIR"
    )
    epochs: float | None = option(
        None, "Passes over the training files; default: the task's, as the next ones.", minimum=0.01
    )
    lr: float | None = option(None, "Highest learning rate of the fine-tuning.", minimum=0)
    lr_warmup_fraction: float | None = option(
        None,
        "Share of the steps in which the learning rate rises; then it falls to 0 on a line.",
        minimum=0,
        maximum=1,
    )
    micro_batch_size: int | None = option(
        None, "Samples of a pass on one device: questions of multiple choice.", minimum=1
    )
    global_batch_size: int | None = option(None, "Samples of a step over all devices.", minimum=1)
    seq_length: int | None = option(
        None, "Tokens of a sequence, at most; longer texts are cut.", minimum=8
    )
    eval_interval: int | None = option(
        None, "Steps between validations; default: those of an epoch.", minimum=1
    )
    seeds: tuple[int, ...] = option(
        (1234,), "Seeds: a run for each, then mean and standard deviation.", metavar="N", minimum=0
    )
    train_data: tuple[str, ...] = option(
        (),
        "Training files of the task, or folders of RACE, in place of those in --task-data.",
        metavar="PATH",
    )
    valid_data: tuple[str, ...] = option(
        (), "Files that choose the best checkpoint, like --train-data.", metavar="PATH"
    )
    test_data: tuple[str, ...] = option(
        (), "Files that the best checkpoint is scored on, like --train-data.", metavar="PATH"
    )


ONLY_FINETUNE = (
    *("save", "epochs", "lr", "lr_warmup_fraction", "micro_batch_size", "global_batch_size"),
    *("eval_interval", "seeds", "train_data", "valid_data", "test_data"),
)
"""Options without a meaning for an evaluation that trains nothing."""
