"""Tests of `lmcore.config.section`: the settings of a loop that reads few of them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

import lmcore.config.section
from lmcore.config.section import SECTION_NAMES, SECTIONS, Config, config_of


def given() -> Config:
    """Return settings with values in one section; the other sections do not exist yet."""
    return config_of({"accelerator": {"device": "cpu", "num_threads": 2}}, {})


def test_sections_without_values_have_the_defaults() -> None:
    config = given()
    assert set(vars(config)) == {"accelerator", "plugins"}
    assert config.training == SECTIONS["training"]()
    whole = Config(accelerator=SECTIONS["accelerator"](device="cpu", num_threads=2))
    assert given() == whole
    assert hash(given()) == hash(whole)
    assert dataclasses.asdict(given()) == dataclasses.asdict(whole)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_settings_can_be_copied_and_changed(copied) -> None:
    config = copied(given())
    assert config.accelerator.num_threads == 2
    changed = dataclasses.replace(config, parallel=SECTIONS["parallel"](zero_stage=1))
    assert (changed.parallel.zero_stage, changed.accelerator) == (1, config.accelerator)


def test_unknown_attributes_are_errors() -> None:
    with pytest.raises(AttributeError, match="`Config` has no attribute `modell`"):
        given().modell  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute `ModellSection`"):
        lmcore.config.section.ModellSection  # noqa: B018


def test_each_field_of_the_settings_is_a_section() -> None:
    fields = [field.name for field in dataclasses.fields(Config)]
    assert fields == [*SECTION_NAMES, "plugins"]
    assert list(SECTIONS) == list(SECTION_NAMES)
    whole = Config()
    assert all(type(getattr(whole, name)) is SECTIONS[name] for name in SECTION_NAMES)
