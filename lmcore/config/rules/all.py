"""What can be wrong with a run's settings, one small function a rule; all problems are reported.

No tokenizer is needed, so that a run's settings are checked before anything is built; `resolve`
asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lmcore.config.load import LoadedConfig
from lmcore.config.optimizers import optimizer_problems
from lmcore.config.rules.batch import loss_scales, ramp_up
from lmcore.config.rules.data import DATA_RULES
from lmcore.config.rules.deepspeed import DEEPSPEED_RULES, accumulation
from lmcore.config.rules.model import MODEL_RULES
from lmcore.config.rules.parallel import data_parallel_size, parallel_problems
from lmcore.config.rules.profile import profile_problems
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["DEFAULT_TRAIN_ITERS", "RULES", "problems_of"]

DEFAULT_TRAIN_ITERS = 1500
"""Steps of a run that is given neither `train_iters` nor `train_samples`."""

Problems = Iterator[LmcoreError]


def problems_of(loaded: LoadedConfig, *, world_size: int) -> list[LmcoreError]:
    """Return every problem that settings and number of processes decide, in the rules' order."""
    found = [problem for rule in RULES for problem in rule(loaded)]
    found += parallel_problems(loaded, world_size)
    found += profile_problems(loaded, world_size=world_size, train_iters=_train_iters(loaded))
    data = data_parallel_size(loaded, world_size)
    if data is None:
        return found
    found += [*_batch_sizes(loaded, data), *ramp_up(loaded, data)]
    return [*found, *accumulation(loaded, data)]


def _train_iters(loaded: LoadedConfig) -> int | None:
    """Return the steps of the run; None where samples say how many there are."""
    if loaded.value("train_samples") is not None:
        return None
    steps: int = loaded.value("train_iters") or DEFAULT_TRAIN_ITERS
    return steps


def _batch_sizes(loaded: LoadedConfig, data_size: int) -> Problems:
    total, micro = loaded.value("global_batch_size"), loaded.value("micro_batch_size")
    together = micro * data_size
    if total is None or total % together == 0:
        return
    lower = total // together * together
    sizes = (lower, lower + together)
    yield ConfigError(
        f"global batch size ({total}) is not divisible by micro batch size ({micro}) "
        f"times data parallel size ({data_size})",
        why=f"every process runs the same number of micro-batches, {together} samples together",
        hint=" or ".join(f"`--global-batch-size {size}`" for size in sizes if size),
    )


def _length(loaded: LoadedConfig) -> Problems:
    yield from _exclusive(loaded, "train_iters", "train_samples")
    samples, total = loaded.value("train_samples"), loaded.value("global_batch_size")
    batch = total or loaded.value("micro_batch_size")
    batch = next(iter(loaded.value("rampup_batch_size")), batch)  # the first step's
    if samples is not None and samples < batch:
        yield ConfigError(
            f"{loaded.shown('train_samples')} is less than one step",
            why=f"a step takes {batch} samples",
            hint=f"use `--train-samples {batch}` or more, or a smaller batch",
        )


def _schedule_units(loaded: LoadedConfig) -> Problems:
    """Samples go with samples and steps with steps, as both count the same run."""
    by_samples = loaded.value("train_samples") is not None
    unit, other = ("train_samples", "iters") if by_samples else ("train_iters", "samples")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}"):
        if loaded.value(name):
            instead = name.replace(other, "samples" if by_samples else "iters")
            why = (
                f"the run's length is set by {loaded.shown(unit)}"
                if _set(loaded, unit)
                else ("the run's length is counted in steps unless `train_samples` is given")
            )
            yield ConfigError(
                f"{loaded.shown(name)} does not go with `{unit}`",
                why=why,
                hint=f"use `{_flag(instead)}`",
            )


def _warmup(loaded: LoadedConfig) -> Problems:
    yield from _exclusive(loaded, "lr_warmup_fraction", "lr_warmup_iters")
    yield from _exclusive(loaded, "lr_warmup_fraction", "lr_warmup_samples")
    if loaded.value("train_samples") is not None:
        warmup, decay = "lr_warmup_samples", "lr_decay_samples"
        span = loaded.value(decay) or loaded.value("train_samples")
    else:
        warmup, decay = "lr_warmup_iters", "lr_decay_iters"
        span = loaded.value(decay) or loaded.value("train_iters") or DEFAULT_TRAIN_ITERS
    if loaded.value(warmup) > span:
        yield ConfigError(
            f"{loaded.shown(warmup)} is longer than the decay of {span}",
            why="the learning rate warms up within its decay",
            hint=f"use `{_flag(warmup)} {span // 100}`, or a larger `{_flag(decay)}`",
        )


def _rates(loaded: LoadedConfig) -> Problems:
    if loaded.value("min_lr") > loaded.value("lr"):
        yield ConfigError(
            f"{loaded.shown('min_lr')} exceeds {loaded.shown('lr')}",
            why="the rate decays from lr to min_lr",
            hint="use a smaller `--min-lr`, a tenth of `--lr` is common",
        )


def _tokenizer(loaded: LoadedConfig) -> Problems:
    kind = loaded.value("tokenizer_type")
    settings = TokenizerSettings.of(loaded.config.data)
    given = [name for name in settings.given() if name != "vocab_size"]
    if kind is None:
        yield from _tokenizer_without_type(loaded, given)
        return
    options = BUILT_IN_TYPES.get(kind)
    if options is None:  # a plugin's
        return
    for missing in settings.missing(options):
        yield ConfigError(f"{loaded.shown('tokenizer_type')} needs {missing}", hint=options.hint)
    allowed = " ".join(f"`{_flag(name)}`" for name in options.allowed)
    for name in given:
        if name not in options.allowed:
            yield ConfigError(
                f"{loaded.shown(name)} does not go with {loaded.shown('tokenizer_type')}",
                why=f"it takes {allowed}" if allowed else "it takes no options",
                hint=f"leave `{_flag(name)}` out, or choose another type",
            )


def _tokenizer_without_type(loaded: LoadedConfig, given: list[str]) -> Problems:
    """A vocabulary and merges together say the type; nothing else does."""
    for name in given:
        other = {"vocab_file": "merge_file", "merge_file": "vocab_file"}.get(name)
        wanted = _flag(other or "tokenizer_type")
        yield ConfigError(
            f"{loaded.shown(name)} stands without `{wanted}`",
            why="byte-pair encoding takes a vocabulary and the merges that made it"
            if other
            else "several types of tokenizers take it",
            hint=f"add `{wanted} FILE`, or the `--tokenizer-type` that takes it alone"
            if other == "merge_file"
            else f"add `{wanted} {'FILE' if other else 'TYPE'}`",
        )


def _files(loaded: LoadedConfig) -> Problems:
    for name in ("vocab_file", "merge_file"):
        path = loaded.value(name)
        if path is not None and not Path(path).is_file():
            yield ConfigError(f"{loaded.shown(name)}: no such file", hint="check the path")
    for name in ("tokenizer_model", "tokenizer_name_or_path"):
        path = loaded.value(name)
        if path is not None and not Path(path).exists():
            yield ConfigError(
                f"{loaded.shown(name)}: no such file or directory",
                why="a tokenizer is read from the disk, and nothing is downloaded",
                hint="check the path",
            )


def _loading(loaded: LoadedConfig) -> Problems:
    yield from _exclusive(
        loaded, "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"
    )
    if loaded.value("finetune") and loaded.value("load") is None:
        yield ConfigError(
            f"{loaded.shown('finetune')} needs `--load`",
            why="fine-tuning starts from a checkpoint's weights",
            hint="add `--load DIR`",
        )


RULES: tuple[Callable[[LoadedConfig], Problems], ...] = (
    *MODEL_RULES,
    _length,
    _schedule_units,
    _warmup,
    _rates,
    optimizer_problems,
    loss_scales,
    _tokenizer,
    _files,
    *DATA_RULES,
    _loading,
    *DEEPSPEED_RULES,
)
"""The rules that need nothing but the settings."""


def _exclusive(loaded: LoadedConfig, first: str, second: str) -> Problems:
    if _set(loaded, first) and _set(loaded, second):
        yield ConfigError(
            f"{loaded.shown(first)} and {loaded.shown(second)} exclude each other",
            hint="keep one of them",
        )


def _set(loaded: LoadedConfig, name: str) -> bool:
    return loaded.value(name) not in (None, 0, ())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
