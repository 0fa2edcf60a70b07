"""What can be wrong with the shape of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lmcore.config.load import LoadedConfig
from lmcore.config.model_math import ffn_width, head_width
from lmcore.config.section.model import ModelSection
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["MODEL_RULES"]

Problems = Iterator[LmcoreError]


def _heads(loaded: LoadedConfig) -> Problems:
    hidden, heads = loaded.value("hidden_size"), loaded.value("num_attention_heads")
    if loaded.value("kv_channels") or hidden % heads == 0:
        return
    divisors = [n for n in range(1, min(hidden, 4 * heads) + 1) if hidden % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - heads))[:3])
    lower, upper = hidden // heads * heads, (hidden // heads + 1) * heads
    sizes = " or ".join(f"`--hidden-size {size}`" for size in (lower, upper) if size)
    yield ConfigError(
        f"{loaded.shown('hidden_size')} is not divisible by {loaded.shown('num_attention_heads')}",
        why="every attention head has hidden_size / num_attention_heads channels",
        hint=f"use {_listed(near)} heads, or {sizes}",
    )


def _groups(loaded: LoadedConfig) -> Problems:
    groups, heads = loaded.value("num_query_groups"), loaded.value("num_attention_heads")
    if groups is None:
        return
    if not loaded.value("group_query_attention"):
        yield ConfigError(
            f"{loaded.shown('num_query_groups')} needs `--group-query-attention`",
            why="without it each query head has keys and values of its own",
            hint="add `--group-query-attention`, or leave it out",
        )
    elif heads % groups:
        near = sorted(n for n in range(1, heads + 1) if heads % n == 0)
        near = sorted(sorted(near, key=lambda n: abs(n - groups))[:3])
        yield ConfigError(
            f"{loaded.shown('num_attention_heads')} is not divisible by "
            f"{loaded.shown('num_query_groups')}",
            why="each head of keys and values serves the same number of query heads",
            hint=f"use {_listed(near)} groups",
        )


def _feed_forward(loaded: LoadedConfig) -> Problems:
    if ffn_width(_model(loaded)) > 0:
        return
    yield ConfigError(
        f"{loaded.shown('hidden_size')} gives `--swiglu` a feed-forward layer without channels",
        why="its width is 8/3 hidden_size, down to a multiple of 64",
        hint="use `--ffn-hidden-size` to set it",
    )


def _positions(loaded: LoadedConfig) -> Problems:
    length, positions = loaded.value("seq_length"), loaded.value("max_position_embeddings")
    if positions is None or length <= positions:
        return
    learned = loaded.value("position_embedding_type") == "learned_absolute"
    yield ConfigError(
        f"{loaded.shown('seq_length')} exceeds {loaded.shown('max_position_embeddings')}",
        why="a token beyond the last learned position has no embedding"
        if learned
        else "that is the longest sequence that the model is said to be for",
        hint=f"use `--max-position-embeddings {length}` or `--seq-length {positions}`",
    )


def _rotation(loaded: LoadedConfig) -> Problems:
    model = _model(loaded)
    if model.position_embedding_type != "rope":
        yield from _without(
            loaded,
            ("rotary_base", "rotary_percent", "use_rope_scaling"),
            needed="--position-embedding-type rope",
            why="no other positions are rotated",
        )
        return
    if not model.use_rope_scaling:
        yield from _without(
            loaded,
            ("rope_scaling_factor",),
            needed="--use-rope-scaling",
            why="without it the rotation is as fast as `--rotary-base` says",
        )
    channels = head_width(model)
    rotated = int(channels * model.rotary_percent)
    if rotated % 2 or not rotated:
        yield ConfigError(
            f"{rotated} of a head's {channels} channels cannot be rotated",
            why="they are rotated in pairs",
            hint="use `--rotary-percent`, `--kv-channels` or another number of heads to have an "
            "even number of them",
        )


def _without(loaded: LoadedConfig, names: tuple[str, ...], *, needed: str, why: str) -> Problems:
    """Yield a problem for each option that has another value than its default."""
    for name in names:
        if loaded.value(name) != getattr(ModelSection(), name):
            yield ConfigError(
                f"{loaded.shown(name)} needs `{needed}`",
                why=why,
                hint=f"add `{needed}`, or leave it out",
            )


MODEL_RULES: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _heads,
    _groups,
    _feed_forward,
    _positions,
    _rotation,
)


def _model(loaded: LoadedConfig) -> ModelSection:
    return loaded.config.model


def _listed(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
