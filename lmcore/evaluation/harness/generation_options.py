"""Options of generation of lm-eval-harness's tasks, `generation_kwargs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.generation.sampling.options import SamplingOptions

__all__ = ["GenerationOptions", "read_options"]

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of tokens, the first one that is given counts."""
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty"),
)
_PENALTIES = _SAMPLING[4:]
"""Options that have an effect without random numbers, too."""
_OTHERS = {"do_sample", "until", "seed", "num_beams", *_LENGTHS}


@dataclass(frozen=True)
class GenerationOptions:
    """Options of a text.

    Attributes:
        tokens: Largest number of tokens.
        stop: Texts that end it, none of them empty.
        sampling: Choice of each token.
        seed: Seed of the first text of a list.
    """

    tokens: int
    stop: tuple[str, ...]
    sampling: SamplingOptions
    seed: int = 0


def read_options(given: Mapping[str, Any], tokens: int) -> GenerationOptions:
    """Return the options of a task.

    As in lm-eval-harness, tokens are drawn if `do_sample` is true, or absent beside a temperature
    above 0; otherwise the most probable one is taken.

    Args:
        given: Options by name.
        tokens: Number of tokens where the task does not say how many.

    Raises:
        ConfigError: One of them is not supported, or out of range.
    """
    unknown = sorted(set(given) - _OTHERS - set(_SAMPLING))
    if unknown or given.get("num_beams", 1) != 1:
        name = unknown[0] if unknown else "num_beams"
        raise ConfigError(
            f"the option `{name}: {given[name]!s:.60}` of generation is not supported",
            why="a task has it in `generation_kwargs`",
            hint=f"the options are {', '.join(sorted(_OTHERS | set(_SAMPLING)))}",
        )
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    length = next((given[one] for one in _LENGTHS if given.get(one) is not None), tokens)
    values = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    temperature = float(values.get("temperature", 0.0))
    draws = given.get("do_sample")
    if draws if draws is not None else temperature > 0:
        sampling = SamplingOptions(**values)
    else:
        sampling = SamplingOptions(
            greedy=True, **{name: values[name] for name in _PENALTIES if name in values}
        )
    kept = tuple(str(one) for one in stop if one)
    return GenerationOptions(int(length), kept, sampling, int(given.get("seed") or 0))
