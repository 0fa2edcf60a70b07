"""The plan of a run from valid settings: defaults derived, sizes counted.

`load_config`, `validate` and `resolve` follow each other.  Nothing after `resolve` decides anything
about the configuration, with one exception: the learning-rate schedule of a run that resumes is the
checkpoint's, or the one that `--schedule` chooses, in `lmcore/train/resume/restore.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.config.derived.batch_size import batch_sizes
from lmcore.config.derived.data_source import RunSources, TaskData
from lmcore.config.derived.model_math import ffn_hidden_size, model_shape, num_query_groups
from lmcore.config.plan import ResumePoint, RunPlan
from lmcore.config.rules.training import DEFAULT_TRAIN_ITERS
from lmcore.config.section import Config
from lmcore.config.section.model import ModelSection
from lmcore.config.settings import LoadedConfig, Provenance
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import ValidConfig
from lmcore.model.family import Family, ForwardFlops, family_of
from lmcore.model.parameters import parameter_count
from lmcore.model.shape import ModelShape
from lmcore.model.vocabulary import USUAL_MULTIPLE, pad_vocab_size, vocabulary_multiple

__all__ = ["RunPlan", "resolve"]


def resolve(
    validated: ValidConfig,
    *,
    tokenizer: TokenizerIdentity,
    sources: RunSources | None = None,
    resume: ResumePoint | None = None,
) -> RunPlan:
    """Return the plan of a run.

    Args:
        validated: Settings without problems.
        tokenizer: Identity of the run's tokenizer.
        sources: Data sources with the datasets of file lists and their metadata; None: the
            sources as the flags name them.
        resume: The checkpoint to continue from, if there is one.

    Raises:
        ConfigError: `vocab_size` or `pad_vocab_size_to` is less than the tokenizer needs.
    """
    loaded, layout = validated.loaded, validated.layout
    # The other item of `loaded.sources` is the list of problems, which `validate` has raised.
    rows = loaded.config.model.pad_vocab_size_to
    if rows is None:
        rows = _rows_of_checkpoint(loaded, resume)
    _check_vocabulary(loaded, tokenizer.vocab_size, rows)
    found = loaded.sources[0] if sources is None else sources
    config, provenance = _derive_defaults(loaded, layout.data, resume, found.task)
    vocabulary = max(tokenizer.vocab_size, config.data.vocab_size or 0)
    model = _with_rows(config.model, vocabulary, layout.tensor, rows)
    _check_padding(loaded, vocabulary, layout.tensor)
    if model.pad_vocab_size_to is not None and model != config.model:
        origin = Provenance("derived", "a multiple that gives pad_vocab_size_to")
        provenance["make_vocab_size_divisible_by"] = origin
    config = dataclasses.replace(config, model=model)
    training = config.training
    batch = _required(training.global_batch_size)
    padded = pad_vocab_size(
        vocabulary,
        divisible_by=model.make_vocab_size_divisible_by,
        tensor_parallel_size=layout.tensor,
    )
    train_iters, train_samples = _train_length(config, batch)
    decay, warmup = _lr_samples(config, train_iters, train_samples, batch)
    valid_samples, test_samples = _evaluation_samples(config, train_iters, batch)
    num_labels = found.task.num_labels if found.task else 0
    shape = model_shape(model, padded, config, num_labels=num_labels)
    family = family_of(shape)
    if not training.include_padding_in_loss:
        shape = dataclasses.replace(shape, vocab_size=vocabulary)
    return RunPlan(
        config=config,
        provenance=provenance,
        preset=loaded.preset,
        sources=found,
        tokenizer=tokenizer,
        resume=resume,
        world_size=layout.world_size,
        layout=layout,
        num_micro_batches=batch // (training.micro_batch_size * layout.data),
        vocab_size=vocabulary,
        padded_vocab_size=padded,
        train_iters=train_iters,
        train_samples=train_samples,
        valid_samples=valid_samples,
        test_samples=test_samples,
        lr_decay_samples=decay,
        lr_warmup_samples=warmup,
        parameter_count=parameter_count(family.parameters(shape)),
        flops_per_step=batch * _forward_flops(family, shape, config).of_training(),
        model_shape=_shape(model, padded),
        shape=shape,
    )


def _forward_flops(family: Family, shape: ModelShape, config: Config) -> ForwardFlops:
    if family.forward_flops_of is not None:
        return family.forward_flops_of(shape, config)
    return family.forward_flops(shape, config.model.seq_length)


def _rows_of_checkpoint(loaded: LoadedConfig, resume: ResumePoint | None) -> int | None:
    """Return the rows of the vocabulary that a run takes from its checkpoint; None if it does not.

    It does with settings of the checkpoint, unless the user gave another padding.
    """
    if resume is None or loaded.provenance["make_vocab_size_divisible_by"].kind != "checkpoint":
        return None
    rows = resume.manifest.model_shape.get("padded_vocab_size")
    return rows if type(rows) is int and rows > 0 else None


def _with_rows(
    model: ModelSection, vocab_size: int, tensor_parallel_size: int, rows: int | None
) -> ModelSection:
    """Return the settings of the model with a padding that gives *rows*, if there is one.

    Args:
        model: Settings of the model.
        vocab_size: Number of tokens.
        tensor_parallel_size: Number of ranks that divide the rows.
        rows: Rows of the checkpoint or of `pad_vocab_size_to`; None for any number.
    """
    if rows is None or vocab_size > rows or rows % tensor_parallel_size:
        return model
    padded = pad_vocab_size(
        vocab_size,
        divisible_by=model.make_vocab_size_divisible_by,
        tensor_parallel_size=tensor_parallel_size,
    )
    if padded == rows:
        return model
    multiple = vocabulary_multiple(vocab_size, rows, tensor_parallel_size=tensor_parallel_size)
    return dataclasses.replace(model, make_vocab_size_divisible_by=multiple)


def _check_padding(loaded: LoadedConfig, vocab_size: int, tensor_parallel_size: int) -> None:
    """Raise a `ConfigError` if the vocabulary is larger than what it is padded to."""
    rows = loaded.config.model.pad_vocab_size_to
    if rows is not None and rows < vocab_size:
        source = (
            "`--vocab-size`" if loaded.config.data.vocab_size == vocab_size else "the tokenizer"
        )
        usual = pad_vocab_size(
            vocab_size, divisible_by=USUAL_MULTIPLE, tensor_parallel_size=tensor_parallel_size
        )
        raise ConfigError(
            f"{loaded.shown('pad_vocab_size_to')} is less than the {vocab_size} tokens of {source}",
            why="a token beyond the rows has no embedding",
            hint=f"use `--pad-vocab-size-to {usual}`, or another number of {vocab_size} or more",
        )


def _check_vocabulary(loaded: LoadedConfig, vocab_size: int, rows: int | None) -> None:
    data, own = loaded.config.data, loaded.config.model.pad_vocab_size_to
    if own is None and data.vocab_size is None and rows is not None and vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, the checkpoint {rows} rows of the vocabulary",
            why="a token beyond the vocabulary has no embedding",
            hint="use the checkpoint's tokenizer, and data prepared with it",
        )
    # NullTokenizer is made from `vocab_size` and adds its end-of-document token to it.
    if data.vocab_size is None or data.tokenizer_type == "NullTokenizer":
        return
    if data.vocab_size < vocab_size:
        hint = f"leave `--vocab-size` out, or use {vocab_size} or more"
        if loaded.provenance["tokenizer_type"].kind == "checkpoint":
            hint = f"add `--vocab-size {vocab_size}`: the new rows get initial values"
        elif loaded.provenance["vocab_size"].kind == "checkpoint":
            hint = "use the checkpoint's tokenizer, and data prepared with it"
        raise ConfigError(
            f"{loaded.shown('vocab_size')} is less than the tokenizer's {vocab_size} tokens",
            why="a token beyond the vocabulary has no embedding",
            hint=hint,
        )


def _derive_defaults(
    loaded: LoadedConfig,
    data_parallel_size: int,
    resume: ResumePoint | None,
    task: TaskData | None,
) -> tuple[Config, dict[str, Provenance]]:
    """Return the settings with derived defaults, and their provenance."""
    config, provenance = loaded.config, dict(loaded.provenance)
    model, training = config.model, config.training
    filled: dict[str, dict[str, Any]] = {n: {} for n in ("model", "data", "training", "task")}

    def derive(section: str, name: str, value: Any, formula: str) -> None:
        filled[section][name] = value
        provenance[name] = Provenance("derived", formula)

    if model.ffn_hidden_size is None:
        formula = "8/3 hidden_size, down to a multiple of 64" if model.swiglu else "4 * hidden_size"
        derive("model", "ffn_hidden_size", ffn_hidden_size(model), formula)
    if model.group_query_attention and model.num_query_groups is None:
        derive("model", "num_query_groups", num_query_groups(model), "one for all query heads")
    if model.max_position_embeddings is None:
        derive("model", "max_position_embeddings", model.seq_length, "seq_length")
    if training.global_batch_size is None:
        derive("training", "global_batch_size", *_global_batch(loaded, data_parallel_size, resume))
    if training.train_iters is None and training.train_samples is None:
        derive("training", "train_iters", DEFAULT_TRAIN_ITERS, "the length of a run without one")
    batch = filled["training"].get("global_batch_size", training.global_batch_size)
    for derived in _of_task(loaded, task, _required(batch)):
        derive(*derived)
    for name, kept in _kept_settings(resume).items():
        if not loaded.given(name) and kept != loaded.value(name):
            filled[loaded.options[name].section][name] = kept
            provenance[name] = Provenance("checkpoint")  # a setting: the run's file repeats it
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model, **filled["model"]),
        data=dataclasses.replace(config.data, **filled["data"]),
        training=dataclasses.replace(training, **filled["training"]),
        task=dataclasses.replace(config.task, **filled["task"]),
    )
    return config, provenance


def _of_task(
    loaded: LoadedConfig, task: TaskData | None, batch: int
) -> Iterator[tuple[str, str, Any, str]]:
    """Yield section, name, value and formula of the settings that follow from a task's files."""
    if task is None:
        return
    if task.labels != loaded.config.task.task_labels:
        yield "task", "task_labels", task.labels, "the classes of task_data"
    if not loaded.given("eval_iters"):
        yield "training", "eval_iters", -(-task.rows.get("valid", 0) // batch), "one validation set"


def _kept_settings(resume: ResumePoint | None) -> dict[str, Any]:
    """Return the settings of a checkpoint's run that a run which resumes keeps by default."""
    if resume is None:
        return {}
    return {**resume.data_rules, **resume.loss_rules}


def _global_batch(
    loaded: LoadedConfig, data_parallel_size: int, resume: ResumePoint | None
) -> tuple[int, str]:
    """Return the global batch size of a run that is given none, and its formula.

    Raises:
        ConfigError: The checkpoint's global batch size does not fit the micro-batches.
    """
    micro_batch_size = loaded.config.training.micro_batch_size
    each = micro_batch_size * data_parallel_size
    steps, formula = loaded.accumulation_steps, "micro_batch_size * data-parallel size"
    if loaded.config.training.step_batch_size_schedule:
        return batch_sizes(loaded.config, each).final, "the last of step_batch_size_schedule"
    if steps is not None:
        file = loaded.config.parallel.engine_file
        return each * steps, f"{formula} * gradient_accumulation_steps of {file}"
    if resume is None or resume.global_batch_size is None:
        return each, formula
    batch = resume.global_batch_size
    if batch % each:
        raise ConfigError(
            f"the checkpoint's global batch size ({batch}) is not divisible by micro batch size "
            f"({micro_batch_size}) times data parallel size ({data_parallel_size})",
            why="a run that resumes keeps the checkpoint's global batch size",
            hint=f"use a `--micro-batch-size` or a number of processes that divides {batch}, or "
            f"another batch size: `--global-batch-size {-(-batch // each) * each}`",
        )
    return batch, "the checkpoint's"


def _train_length(config: Config, batch: int) -> tuple[int, int]:
    """Return the number of steps and samples; an incomplete last batch of samples is dropped."""
    training = config.training
    if training.train_samples is not None:
        sizes = batch_sizes(config, batch)
        return sizes.steps(training.train_samples), training.train_samples
    steps = _required(training.train_iters)
    return steps, steps * batch


def _lr_samples(
    config: Config, train_iters: int, train_samples: int, batch: int
) -> tuple[int, float]:
    """Return the length of decay and warm-up in samples, as Megatron counts them."""
    optimizer = config.optimizer
    if config.training.train_samples is not None:
        decay = optimizer.lr_decay_samples or train_samples
        warmup = optimizer.lr_warmup_samples
    else:
        decay = (optimizer.lr_decay_iters or train_iters) * batch
        warmup = optimizer.lr_warmup_iters * batch
    if optimizer.lr_warmup_fraction is not None:
        return decay, optimizer.lr_warmup_fraction * decay
    return decay, warmup


def _evaluation_samples(config: Config, train_iters: int, batch: int) -> tuple[int, int]:
    """Return the number of samples in all validations, and in one test."""
    interval, iters = config.training.eval_interval, config.training.eval_iters
    validations = train_iters // interval + 1 if interval else 0
    return validations * iters * batch, iters * batch


def _shape(model: ModelSection, padded_vocab_size: int) -> dict[str, int]:
    grouped = {"num_query_groups": num_query_groups(model)} if model.group_query_attention else {}
    wide = {"kv_channels": model.kv_channels} if model.kv_channels else {}
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": _required(model.ffn_hidden_size),
        "max_position_embeddings": _required(model.max_position_embeddings),
        "padded_vocab_size": padded_vocab_size,
        **grouped,
        **wide,
    }


def _required(value: int | None) -> int:
    assert value is not None, "derived before it is read"
    return value
