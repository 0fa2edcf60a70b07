"""Absurd sizes of every integer option: a message or accepted settings, never a traceback."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.section import run_options
from lmcore.config.validate import problems_of

INTEGERS = [option for option in run_options().values() if option.type is int]


@pytest.mark.parametrize("option", INTEGERS, ids=lambda option: option.name)
def test_absurd_size_is_at_most_an_error(option):
    """A large value is accepted or refused with a message; one above 10^12 is out of range."""
    for size in (10**6, 2**31, 10**12):
        if option.maximum is None or size <= option.maximum:
            loaded = load_config([option.flag, str(size)])
            for problem in problems_of(loaded, world_size=1):
                assert problem.render()
    for size in (2**63, 10**24, -(10**24)):
        with pytest.raises(ConfigError) as caught:
            load_config([option.flag, str(size)])
        assert f"`{option.flag} {size}`: out of range" in caught.value.what
        if size > 0:
            assert f"<= {option.maximum or 10**12}" in str(caught.value.why)


@pytest.mark.parametrize("line", ["--num-threads 99999", "--seed 4294967296"])
def test_values_that_libraries_fail_at(line):
    """More threads than a process may start, and seeds that NumPy refuses, are out of range."""
    with pytest.raises(ConfigError, match="out of range"):
        load_config(line.split())


def test_model_that_no_memory_holds():
    """Sizes that are valid one by one, but give a model of 10^16 parameters, are an error."""
    loaded = load_config(["--num-layers", "1000000", "--hidden-size", "100000"])
    (problem,) = problems_of(loaded, world_size=1)
    assert "`--num-layers 1000000`" in problem.what
    assert "parameters" in problem.what
