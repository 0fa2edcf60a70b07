"""The GPU's own settings of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.option import options_of
from lmcore_xpu import plugin
from lmcore_xpu.settings import XpuSection, allocator_settings, problems_of, settings_of


def configured(**values):
    """Return a configuration with these settings of the plugin."""
    return SimpleNamespace(plugins={"xpu": XpuSection(**values)})


def test_settings_are_the_runs_or_the_defaults():
    """A program that made its configuration itself has none of the plugin's."""
    assert settings_of(SimpleNamespace(plugins={})) == XpuSection(tf32=False)
    assert settings_of(configured(tf32=True)).tf32


@pytest.mark.parametrize(
    "name, tf32, refused",
    [
        ("Intel(R) Data Center GPU Max 1550", True, False),
        ("Intel(R) Arc(TM) B580 Graphics", True, False),
        ("Intel(R) Arc(TM) A770 Graphics", True, True),
        ("Intel(R) Arc(TM) A770 Graphics", False, False),
        ("Intel(R) Graphics of tomorrow", True, False),
    ],
)
def test_tf32_is_refused_where_there_is_none(name, tf32, refused):
    """By name of the card; an unknown one is let through."""
    problems = problems_of(SimpleNamespace(name=name), configured(tf32=tf32))
    assert bool(problems) is refused
    for problem in problems:
        assert problem.what == "`--xpu-tf32`: this GPU has no TF32"
        assert name in problem.why
        assert problem.hint == "leave it out"


def test_the_settings_become_flags():
    """The hook registers the section."""
    registered = []
    plugin.lmcore_add_options(SimpleNamespace(add=registered.append))
    assert registered == [XpuSection]


DIVISIONS = "roundup_power2_divisions:[256:1,512:2]"
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{DIVISIONS}"}


@pytest.mark.parametrize(
    "values, env, expected",
    [
        ({}, ENVIRONMENT, ""),
        ({"max_split_size_mb": 64}, {}, "max_split_size_mb:64"),
        (
            {"expandable_segments": False, "garbage_collection_threshold": 0.8},
            ENVIRONMENT,
            f"{DIVISIONS},expandable_segments:False,garbage_collection_threshold:0.8",
        ),
        (
            {"max_split_size_mb": 64},
            ENVIRONMENT,
            f"expandable_segments:True,{DIVISIONS},max_split_size_mb:64",
        ),
    ],
)
def test_options_replace_settings_of_the_environment(values, env, expected):
    """Torch resets what is not given; without an option nothing is set."""
    assert allocator_settings(XpuSection(**values), env) == expected


def test_the_collection_threshold_is_below_one():
    """Torch refuses 1, and so does the option, before a device is there."""
    options = {option.name: option for option in options_of(XpuSection)}
    threshold = options["garbage_collection_threshold"]
    assert threshold.convert("0.8", where="it") == 0.8
    with pytest.raises(ConfigError, match="< 1"):
        threshold.convert("1", where="it")
