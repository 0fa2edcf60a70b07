"""Lengths in tokens: flags that give a number of samples by their tokens, as Megatron's forks have.

A sample has `seq_length` tokens.  The settings of a run have the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmcore.config.option import Option
from lmcore.config.settings import Provenance

__all__ = ["TOKEN_OPTIONS", "SamplesOfTokens", "samples_of_tokens"]


def _option(name: str, help_text: str) -> Option:
    return Option(
        name=name,
        section="",
        type=int,
        repeated=False,
        optional=True,
        default=None,
        help=help_text,
        minimum=1,
    )


_SAMPLES = {
    "train_tokens": "train_samples",
    "lr_decay_tokens": "lr_decay_samples",
    "lr_warmup_tokens": "lr_warmup_samples",
}
TOKEN_OPTIONS = (
    _option(
        "train_tokens",
        "Number of tokens to train on: train_samples times seq_length. With train_samples, the run "
        "ends after the lower number.",
    ),
    _option(
        "lr_decay_tokens",
        "Tokens over which the learning rate decays, instead of lr_decay_samples.",
    ),
    _option(
        "lr_warmup_tokens",
        "Tokens of linear learning-rate warm-up, instead of lr_warmup_samples.",
    ),
)
"""Flags that set other options and are none of a section."""


class SamplesOfTokens(NamedTuple):
    """Samples that flags give by their tokens.

    Attributes:
        values: Samples and their source, by option name.
        texts: Flags as typed, by the name of the option that they set.
        notices: A line about each flag.
    """

    values: dict[str, tuple[int, Provenance]]
    texts: dict[str, str]
    notices: list[str]


def samples_of_tokens(
    given: Mapping[str, Any], texts: Mapping[str, str], seq_length: int
) -> SamplesOfTokens:
    """Return the samples that hold the tokens of each flag, rounded up.

    Args:
        given: Values of the flags, by option name.
        texts: Flags as typed, by option name.
        seq_length: Tokens of a sample.
    """
    found = SamplesOfTokens({}, {}, [])
    for name, sets in _SAMPLES.items():
        tokens = given.get(name)
        if tokens is None:
            continue
        samples = -(-tokens // seq_length)
        flag = f"--{sets.replace('_', '-')}"
        line = f"`{texts[name]}` is `{flag} {samples}`, of {seq_length:,} tokens each"
        if name == "train_tokens" and (given.get(sets) or samples) < samples:
            found.notices.append(f"{line}; `{texts[sets]}` ends the run earlier")
            continue
        found.values[sets] = samples, Provenance("flag", texts[name].partition(" ")[0])
        found.texts[sets] = texts[name]
        found.notices.append(line)
    return found
