"""The settings of a tokenizer, from flags to metadata and back."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.cli.data.prepare_section import PrepareSection
from lmcore.cli.generate import GenerateSection
from lmcore.config.section import DataSection
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings

TEXT = st.none() | st.text(min_size=1, max_size=5)
SETTINGS = st.builds(
    TokenizerSettings,
    TEXT, TEXT, TEXT, st.none() | st.integers(1, 9), TEXT, TEXT, st.integers(0, 9),
    st.none() | st.booleans(), st.booleans(),
)  # fmt: skip


@given(SETTINGS)
def test_descriptions_come_back(settings: TokenizerSettings) -> None:
    """The description of settings gives the same settings again."""
    assert TokenizerSettings.described(settings.describe()) == settings


@pytest.mark.parametrize("section", [DataSection, GenerateSection, PrepareSection])
def test_every_command_has_the_options(section: type) -> None:
    """Training, generation and preparation have an option for each setting, of one default."""
    defaults = {field.name: field.default for field in fields(section)}
    for field in fields(TokenizerSettings)[1:]:
        assert defaults[field.name] == field.default


def test_taken_from_a_section() -> None:
    """Settings are the section's values of the same names."""
    section = DataSection(tokenizer_type="HFTokenizer", tokenizer_model="m", vocab_extra_ids=3)
    assert TokenizerSettings.of(section).describe() == {
        "type": "HFTokenizer", "tokenizer_model": "m", "vocab_extra_ids": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    "description", [{"type": 3}, {"vocab_size": True}, {"vocab_file": ["a"]},
                    {"vocab_extra_ids": "3"}, {"add_special_tokens": 1}],
)  # fmt: skip
def test_wrong_types_are_refused(description: dict[str, object]) -> None:
    """A value of another type than the setting's is an error."""
    with pytest.raises(ConfigError, match="has the wrong type"):
        TokenizerSettings.described(description)


def test_what_plugins_add_is_left_out() -> None:
    """A description may have more keys, which are a plugin's own business."""
    found = TokenizerSettings.described({"type": "Theirs", "vocab_file": None, "colour": "red"})
    assert found == TokenizerSettings("Theirs")


def test_flags_as_typed() -> None:
    """Messages name the options as they would be typed."""
    settings = TokenizerSettings(
        "T", vocab_file="v", add_special_tokens=False, parse_special_tokens=True
    )
    assert settings.given() == {
        "vocab_file": "--vocab-file v",
        "add_special_tokens": "--no-add-special-tokens",
        "parse_special_tokens": "--parse-special-tokens",
    }


@pytest.mark.parametrize("kind", BUILT_IN_TYPES)
def test_tables_name_settings(kind: str) -> None:
    """Each type's required and allowed options are settings, without duplicates."""
    allowed = BUILT_IN_TYPES[kind].allowed
    assert set(allowed) <= {field.name for field in fields(TokenizerSettings)}
    assert len(set(allowed)) == len(allowed)
