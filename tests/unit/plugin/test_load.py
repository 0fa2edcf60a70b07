"""Tests of `lmcore.plugin.load`, with `packaging` as the oracle."""

from __future__ import annotations

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from lmcore.plugin.load import is_range, within

RANGES = [
    *(">=1,<2", ">=1.1,<2", ">=2.11", "<2", ">=2.0", "<2.11.0", ">= 2.11 , <3", ">=02.1", " >=1"),
    *("<2.0.0", "~=2.1", "==2.*", "!=2.1", "", ">=2.11.0+cpu", ">=2.11a1", "<=2", ">1,<3"),
]
VERSIONS = [
    *("1", "1.0", "1.2", "2", "2.0", "2.0.0", "2.11", "2.11.0", "2.11.1+cpu", "2.12.0a0+c0ffee"),
    *("3.0.dev1", "2.10.99", "0.9", "2.11.0.post1", "2.11.0+cu12.8", "0"),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_is_within_the_range_that_contains_it(version: str) -> None:
    release = Version(version).base_version
    for specifier in filter(_is_valid, RANGES):
        expected = SpecifierSet(specifier).contains(release, prereleases=True)
        assert within(version, specifier) is expected, specifier


@pytest.mark.parametrize("text", [*RANGES, "2.1", "foo", ">=1;<2", ">=x", ">="])
def test_a_range_is_a_specifier(text: str) -> None:
    assert is_range(text) is _is_valid(text)


def _is_valid(text: str) -> bool:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True
