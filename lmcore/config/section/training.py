"""How long, in which batches, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class TrainingSection:
    """Length of the run, batch sizes, validation and exits."""

    train_iters: int | None = option(None, "Steps to train; excludes train_samples.", minimum=1)
    train_samples: int | None = option(None, "Samples to train; excludes train_iters.", minimum=1)
    micro_batch_size: int = option(8, "Samples of one forward pass on one device.", minimum=1)
    global_batch_size: int | None = option(
        None,
        "Samples of one step over all devices; default: micro_batch_size * data-parallel size.",
        minimum=1,
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "Let the global batch size grow from START by INCREMENT at a time to global_batch_size, "
        "over SAMPLES samples; goes with train_samples.",
        minimum=1,
        metavar="START INCREMENT SAMPLES",
    )
    eval_interval: int = option(250, "Steps between validations; 0 for none.", minimum=0)
    eval_iters: int = option(20, "Global batches of one validation; 0 for none.", minimum=0)
    exit_interval: int | None = option(
        None, "Save and exit when the step is a multiple of this.", minimum=1
    )
    exit_duration_in_mins: float | None = option(
        None, "Save and exit after this many minutes.", above=0
    )
    seed: int = option(1234, "Seed of weights, dropout and data order.", minimum=0)
    compile: bool | None = option(
        None,
        "Compile each transformer block and the loss head with torch.compile; default: where the "
        "device says that it pays.",
    )
    step_graph: bool = option(
        False,
        "Record forward and backward of a micro-batch once and play them again, on devices that "
        "can: for models so small that asking for work takes longer than doing it.",
    )
    async_metrics: bool = option(
        True,
        "Read a step's loss and gradient norm while the next step runs, on devices that work on "
        "their own.",
    )
    manual_gc: bool = option(
        True, "Collect Python's garbage between steps alone, in all processes at the same step."
    )
    manual_gc_interval: int = option(
        100, "Steps between two collections of manual_gc; 0: none between steps.", minimum=0
    )
    sample_prompt: str | None = option(
        None,
        "Text that the sample printed at the end starts with; default: the start of a validation "
        "document.",
    )
    sample_tokens: int = option(
        200, "Tokens of the sample printed at the end; 0 for none.", minimum=0
    )
