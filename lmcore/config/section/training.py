"""Section `training`: length of the run, batch sizes, validation and exits."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need, Situation, setting
from lmcore.config.option import CHECKED, DROPOUT, FREE, OUTPUT_PATH, option

_SAMPLES = setting("--train-samples").else_error(
    "steps of different sizes are counted in samples, as is the learning rate"
)
_EVALUATION_DATA = ("test_data_path", "test_data", "test_weighted_split_paths")
_VALIDATION = Need("`--eval-iters` above 0", lambda run: run.config.training.eval_iters > 0)
_EVALUATION = Need(
    "`--eval-interval` above 0 or test data",
    lambda run: (
        run.config.training.eval_interval > 0 or any(run.value(name) for name in _EVALUATION_DATA)
    ),
)


def _may_mask_targets(run: Situation) -> bool:
    """Return True unless all targets are valid."""
    from lmcore.model.family import families  # not needed to declare the settings

    if run.config.task.task is not None:
        return False
    every_target = not run.family or families()[run.family].every_position_is_a_target
    return bool(run.config.data.eod_mask_loss) or not every_target


def _has_replicas(run: Situation) -> bool:
    """Return True if several ranks may hold the same parameters between two steps."""
    layout, parallel = run.layout, run.config.parallel
    if layout is None or layout.tensor > 1 or layout.pipeline > 1:
        return True
    if not parallel.by_layout:
        return bool(layout.data > 1 and parallel.zero_stage != 3)
    count = layout.replicas if layout.zero_stage else layout.data * layout.context
    return bool(count > 1)


_VALIDATES = Need(
    "`--eval-interval` and `--eval-iters` above 0",
    lambda run: run.config.training.eval_interval > 0 and run.config.training.eval_iters > 0,
    refused="the run has no validation loss",
)
_MASKS = Need("masked targets, as by `--eod-mask-loss`", _may_mask_targets)
_REPLICAS = Need("parameters that several processes hold, not ZeRO's shards", _has_replicas)


@dataclass(frozen=True)
class TrainingSection:
    """Length of the run, batch sizes, validation and exits."""

    train_iters: int | None = option(
        None,
        "Number of steps to train; excludes train_samples; default: 1500.",
        minimum=1,
        on_resume=FREE,
    )
    train_samples: int | None = option(
        None, "Number of samples to train on; excludes train_iters.", minimum=1, on_resume=FREE
    )
    micro_batch_size: int = option(8, "Samples in one forward pass on one device.", minimum=1)
    global_batch_size: int | None = option(
        None,
        "Samples in one step over all devices; default: micro_batch_size * data-parallel size.",
        minimum=1,
        on_resume=CHECKED,
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "Increase the global batch size from START in steps of INCREMENT to global_batch_size, "
        "over SAMPLES samples; needs train_samples.",
        minimum=1,
        metavar="START INCREMENT SAMPLES",
        on_resume=CHECKED,
        needs=_SAMPLES,
    )
    step_batch_size_schedule: tuple[str, ...] = option(
        (),
        "Global batch sizes, each from a number of tokens on: 0:768 250B:1536 500B:3072; the last "
        "is global_batch_size. K, M, B and T stand for 10^3 to 10^12. Needs train_samples.",
        metavar="TOKENS:SIZE",
        on_resume=CHECKED,
        needs=_SAMPLES,
    )
    calculate_per_token_loss: bool = option(
        True,
        "Average the loss over all valid targets of a global batch; off: over the valid targets of "
        "each micro-batch, and these means over micro-batches, as Megatron does without the flag. "
        "A resumed run keeps the checkpoint's.",
        needs=_MASKS,
    )
    include_padding_in_loss: bool = option(
        False,
        "Let rows that pad the vocabulary take part in the softmax and get initial weights, as in "
        "Megatron: losses then depend on their number.  A resumed run keeps the checkpoint's.",
    )
    eval_interval: int = option(
        250,
        "Steps between validations; 0: no validation.",
        minimum=0,
        needs=_VALIDATION.or_off(0),
    )
    eval_iters: int = option(
        20,
        "Global batches in one validation or test; 0: no validation.",
        minimum=0,
        needs=_EVALUATION.or_off(0),
    )
    exit_interval: int | None = option(
        None,
        "Save and exit at the first step that is a multiple of this.",
        minimum=1,
        on_resume=FREE,
    )
    exit_duration_in_mins: float | None = option(
        None,
        "Save and exit after this many minutes, the start of the run included.",
        above=0,
        on_resume=FREE,
    )
    early_stop: int | None = option(
        None,
        "Save and end after this many validations without a lower loss; default: never.",
        minimum=1,
        on_resume=FREE,
        needs=_VALIDATES,
    )
    early_stop_delta: float = option(
        0.0,
        "Least decrease of the validation loss, in nats, that counts as lower for --early-stop.",
        minimum=0,
        on_resume=FREE,
        needs=setting("--early-stop"),
    )
    kill_switch_path: str | None = option(
        None,
        "Save and exit as soon as this file exists; while it exists, no run with it starts.",
        metavar="FILE",
        on_resume=FREE,
        paths=OUTPUT_PATH,
    )
    stop_timeout_minutes: float = option(
        5.0,
        "Minutes that one call may take after a signal or the failure of another process, before "
        "this process ends by force: a hung device never returns; 0: no limit.",
        minimum=0,
        on_resume=FREE,
    )
    seed: int = option(
        1234,
        "Seed of initial weights, dropout and data order.",
        minimum=0,
        maximum=2**32 - 1,
        on_resume=CHECKED,
    )
    compile: bool | None = option(
        None,
        "Compile each transformer block and the loss with torch.compile; default: on devices "
        "whose plugin recommends it.",
        on_resume=DROPOUT,
    )
    step_graph: bool = option(
        False,
        "Capture forward and backward of a micro-batch in a graph and replay it, on devices that "
        "support it; for models so small that launching kernels takes longer than running them.",
        on_resume=DROPOUT,
    )
    async_metrics: bool = option(
        True,
        "Read a step's loss and gradient norm while the next step runs, on devices that run "
        "asynchronously.",
        on_resume=FREE,
    )
    check_replicas_interval: int = option(
        200,
        "Steps between checks that the replicas of parameters are bitwise equal on all processes; "
        "also checked before the first step and every checkpoint; 0: never.",
        minimum=0,
        on_resume=FREE,
        needs=_REPLICAS.or_off(0),
    )
    check_device_interval: int = option(
        100,
        "Steps between checks of the device's health, if its plugin offers them; also checked "
        "before the first step and after an error; 0: only after an error.",
        minimum=0,
        on_resume=FREE,
    )
    manual_gc: bool = option(
        True,
        "Run Python's garbage collection only between steps, in all processes at once.",
        on_resume=FREE,
    )
    manual_gc_interval: int = option(
        100,
        "Steps between garbage collections with manual_gc; 0: never.",
        minimum=0,
        on_resume=FREE,
        needs=setting("--manual-gc"),
    )
    sample_prompt: str | None = option(
        None,
        "Prompt of the sample printed at the end; default: the start of a validation document.",
        on_resume=FREE,
        may_be_empty=True,
        needs=Need("`--sample-tokens` above 0", lambda run: run.config.training.sample_tokens > 0),
    )
    sample_tokens: int = option(
        200, "Tokens in the sample printed at the end; 0: no sample.", minimum=0, on_resume=FREE
    )
