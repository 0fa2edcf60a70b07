"""Rules for the shape of the model, and for the head of a task and its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.derived.data_source import OWN, PARTS, TASK_OPTIONS
from lmcore.config.derived.model_math import ffn_hidden_size, head_size, model_shape
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.model.family import family_of, named_family
from lmcore.model.parameters import parameter_count
from lmcore.model.shape import ModelShape

__all__ = ["MODEL_RULES", "TASK_RULES"]

_MOST_HEADS = 1 << 12
"""Largest number of heads that a hint proposes."""
_MOST_PARAMETERS = 10**15
"""Largest model in parameters: 16 PB of training state, more than any installation holds."""


def _approximate_count(shape: ModelShape) -> int:
    """Return the number of parameters without a table of all layers, which may be very many."""
    count = family_of(shape).parameters
    one, two = (parameter_count(count(replace(shape, num_layers=layers))) for layers in (1, 2))
    return one + (shape.num_layers - 1) * (two - one)


def _family(loaded: LoadedConfig) -> Problems:
    name = loaded.config.model.model_family
    if name is None:
        return
    try:
        chosen = family_of(loaded.config.model)
    except ConfigError as problem:
        yield problem
        return
    yield from chosen.rules(loaded)
    if name.lower() == "llama" and chosen.key != "llama":
        yield ConfigError(
            f"{loaded.shown('model_family')} names a model that the other settings do not give",
            why="a Llama has RMSNorm, SwiGLU and rotary positions",
            hint="add `--normalization RMSNorm --swiglu --position-embedding-type rope`, or use "
            "`--model-family gpt`",
        )


def _parameters(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    if model.model_family and named_family(model.model_family) is None:
        return  # see `_family`
    parameters = _approximate_count(
        model_shape(model, loaded.config.data.vocab_size or 1, loaded.config)
    )
    if parameters > _MOST_PARAMETERS:
        sizes = [name for name in _SIZES if getattr(model, name) is not None]
        largest = max(sizes, key=lambda name: getattr(model, name))
        yield ConfigError(
            f"{loaded.shown(largest)} gives a model of {parameters:.1e} parameters",
            why=f"the largest supported one has {_MOST_PARAMETERS:.0e}",
            hint="check the sizes of the model",
        )


_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
)


def _heads(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels or hidden % heads == 0:
        return
    divisors = [n for n in range(1, min(hidden, 4 * heads, _MOST_HEADS) + 1) if hidden % n == 0]
    lower, upper = hidden // heads * heads, (hidden // heads + 1) * heads
    sizes = " or ".join(f"`--hidden-size {size}`" for size in (lower, upper) if size)
    yield ConfigError(
        f"{loaded.shown('hidden_size')} is not divisible by {loaded.shown('num_attention_heads')}",
        why="every attention head has hidden_size / num_attention_heads channels",
        hint=f"use {_nearest('--num-attention-heads', divisors, heads)}, or {sizes}",
    )


def _query_groups(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    groups, heads = model.num_query_groups, model.num_attention_heads
    if groups is not None and model.group_query_attention and heads % groups:
        divisors = [n for n in range(1, min(heads, _MOST_HEADS) + 1) if heads % n == 0]
        yield ConfigError(
            f"{loaded.shown('num_attention_heads')} is not divisible by "
            f"{loaded.shown('num_query_groups')}",
            why="each key and value head serves the same number of query heads",
            hint=f"use {_nearest('--num-query-groups', divisors, groups)}",
        )


def _feed_forward(loaded: LoadedConfig) -> Problems:
    if ffn_hidden_size(loaded.config.model) == 0:
        yield ConfigError(
            f"{loaded.shown('hidden_size')} gives `--swiglu` a feed-forward layer without channels",
            why="its width is 8/3 hidden_size, rounded down to a multiple of 64",
            hint="use `--ffn-hidden-size N` to set it",
        )


def _padding(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    rows, multiple = model.pad_vocab_size_to, model.make_vocab_size_divisible_by
    if rows is None or not loaded.provenance["make_vocab_size_divisible_by"].by_user:
        return
    if rows % multiple:
        yield ConfigError(
            f"{loaded.shown('pad_vocab_size_to')} is not divisible by "
            f"{loaded.shown('make_vocab_size_divisible_by')}",
            why="both give the rows that the vocabulary is padded to",
            hint=f"use `--pad-vocab-size-to {-(-rows // multiple) * multiple}`, or "
            f"{loaded.removal('make_vocab_size_divisible_by')}",
        )


def _gate(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    if model.swiglu and model.glu_activation:
        yield ConfigError(
            f"{loaded.shown('swiglu')} cannot be combined with {loaded.shown('glu_activation')}",
            why="each names the activation of the feed-forward layer",
            hint="leave it out: `--glu-activation` alone sets it",
        )


_DECODER_PARTS = {
    "glu_activation": "its feed-forward layers have other activations",
    "embed_layernorm": "its embeddings are not normalized",
}


def _decoder_parts(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    if model.model_family and named_family(model.model_family) is None:
        return  # see `_family`
    family = family_of(model)
    if family.matches is not None:
        return
    for name, why in _DECODER_PARTS.items():
        if getattr(model, name):
            yield ConfigError(
                f"{loaded.shown(name)} is not supported by {family.name} models",
                why=why,
                hint="leave it out, or use `--model-family gpt`",
            )


_ENCODINGS = {
    "learned_absolute": "learned positions",
    "rope": "rotary positions",
    "alibi": "ALiBi",
    "relative": "relative positions",
    "none": "no positions at all",
}


def _encoding(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    if model.model_family and named_family(model.model_family) is None:
        return  # see `_family`
    family = family_of(model)
    if model.position_embedding_type in family.positions:
        return
    others = [f"`--position-embedding-type {one}`" for one in family.positions]
    relative = model.position_embedding_type == "relative" and not model.model_family
    yield ConfigError(
        f"{loaded.shown('position_embedding_type')} is not supported by {family.name} models",
        why=f"{family.name} has {' or '.join(_ENCODINGS[one] for one in family.positions)}",
        hint=f"use {' or '.join(others)}" + (", or `--model-family t5`" if relative else ""),
    )


def _positions(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    length, positions = model.seq_length, model.max_position_embeddings
    if positions is None or length <= positions:
        return
    learned = model.position_embedding_type == "learned_absolute"
    longer = f"`--max-position-embeddings {length}` or "
    if learned and loaded.provenance["max_position_embeddings"].kind == "checkpoint":
        longer = ""  # the checkpoint has no more
    yield ConfigError(
        f"{loaded.shown('seq_length')} exceeds {loaded.shown('max_position_embeddings')}",
        why="a token beyond the last learned position has no embedding"
        if learned
        else "that is the longest sequence that the model is declared for",
        hint=f"use {longer}`--seq-length {positions}`",
    )


def _rotation(loaded: LoadedConfig) -> Problems:
    model = loaded.config.model
    channels = head_size(model)
    rotated = int(channels * model.rotary_percent)
    if model.position_embedding_type == "rope" and (rotated % 2 or not rotated):
        yield ConfigError(
            f"{rotated} of a head's {channels} channels cannot be rotated",
            why="channels are rotated in pairs",
            hint="use another `--rotary-percent`, `--kv-channels` or number of heads, so that the "
            "number is even",
        )


MODEL_RULES: tuple[Rule, ...] = (
    _family,
    _parameters,
    _heads,
    _query_groups,
    _feed_forward,
    _padding,
    _gate,
    _decoder_parts,
    _encoding,
    _positions,
    _rotation,
)


def _nearest(flag: str, numbers: list[int], wanted: int) -> str:
    """Return a flag with the three of *numbers* nearest to *wanted*: "`--heads 1`, `2` or `4`"."""
    near = sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:3])
    *others, last = [f"`{flag} {near[0]}`", *(f"`{number}`" for number in near[1:])]
    return f"{', '.join(others)} or {last}" if others else last


_REFUSED = {
    "context_parallel_size": "the head reads one token of a whole sequence",
    "eod_mask_loss": "the loss is of labels, not of tokens",
    "reset_position_ids": "a sample is one text",
    "reset_attention_mask": "a sample is one text",
}
"""Options that a run with a head for a task does not have, each with the reason."""


def _data(loaded: LoadedConfig) -> Problems:
    task = loaded.config.task
    if task.task is None:
        return
    if not task.task_data:
        yield ConfigError(
            f"{loaded.shown('task')} has no data",
            why="its head is trained on labelled texts",
            hint=f"add `{flag_of('task_data')} FILE`: CSV, TSV or JSON lines",
        )
    for option in TASK_OPTIONS.values():
        paths = loaded.value(option)
        for path in paths:
            if not Path(path).is_file():
                kind = "is a directory" if Path(path).is_dir() else "no such file"
                which = f": `{path}`" if len(paths) > 1 else ""
                yield ConfigError(
                    f"{loaded.shown(option)}: {kind}{which}", hint=missing_path_hint(path)
                )
    if not 1 <= len(task.task_text) <= 2:
        yield ConfigError(
            f"{loaded.shown('task_text')} names {len(task.task_text)} columns",
            why="a sample is a text or a pair of texts",
            hint="name one column or two",
        )
    if task.task_labels and len({*task.task_labels}) < max(2, len(task.task_labels)):
        yield ConfigError(
            f"{loaded.shown('task_labels')} are not two or more different names",
            hint="name each class once, or leave it out: the names are taken from the data",
        )


def _other_data(loaded: LoadedConfig) -> Problems:
    """Refuse data without labels; for training data `_exclusive` of the rules for data does."""
    if not loaded.config.task.task_data:
        return
    for part in PARTS[1:]:
        own = TASK_OPTIONS.get(part)
        use = f"use `{flag_of(own)} FILE` in place of " if own else ""
        for option in OWN[part]:
            if loaded.value(option):
                instead = f"{use}`{flag_of(option)}`, or " * bool(own)
                yield ConfigError(
                    f"{loaded.shown(option)} cannot be combined with {loaded.shown('task_data')}",
                    why="the head of a task needs labelled texts",
                    hint=instead + loaded.removal(option),
                )


def _settings(loaded: LoadedConfig) -> Problems:
    if loaded.config.task.task is None:
        return
    for name, why in _REFUSED.items():
        if loaded.value(name) != loaded.options[name].default:
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with {loaded.shown('task')}",
                why=why,
                hint="leave it out",
            )


TASK_RULES: tuple[Rule, ...] = (_data, _other_data, _settings)
