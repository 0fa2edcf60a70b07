"""Options of generation of tasks, as lm-eval-harness reads them."""

from __future__ import annotations

from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.evaluation.harness.generation_options import GenerationOptions, read_options
from lmcore.generation.sampling.options import SamplingOptions

GREEDY = SamplingOptions(greedy=True)


@pytest.mark.parametrize(
    "given,expected",
    [
        ({}, GenerationOptions(256, (), GREEDY)),
        ({"until": "\n", "max_gen_toks": 8}, GenerationOptions(8, ("\n",), GREEDY)),
        ({"until": ["\n", ""], "max_tokens": 9}, GenerationOptions(9, ("\n",), GREEDY)),
        ({"max_new_tokens": 3, "max_gen_toks": 4}, GenerationOptions(4, (), GREEDY)),
        (
            {"do_sample": False, "temperature": 0.8, "top_p": 0.9},
            GenerationOptions(256, (), GREEDY),
        ),
        ({"temperature": 0.0, "num_beams": 1}, GenerationOptions(256, (), GREEDY)),
        (
            {"temperature": 0.8, "top_p": 0.9, "seed": 3},
            GenerationOptions(256, (), SamplingOptions(temperature=0.8, top_p=0.9), 3),
        ),
        ({"do_sample": True, "top_k": 5}, GenerationOptions(256, (), SamplingOptions(top_k=5))),
        (
            {"repetition_penalty": 1.5},
            GenerationOptions(256, (), SamplingOptions(greedy=True, repetition_penalty=1.5)),
        ),
    ],
)
def test_options(given: dict[str, Any], expected: GenerationOptions) -> None:
    assert read_options(given, 256) == expected


@pytest.mark.parametrize(
    "given,message",
    [
        ({"num_beams": 4}, "the option `num_beams: 4` of generation is not supported"),
        ({"typical_p": 0.5}, "the option `typical_p: 0.5` of generation is not supported"),
        ({"do_sample": True, "temperature": 0.0}, "`--temperature 0` is out of range"),
    ],
)
def test_refused_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given, 256)
