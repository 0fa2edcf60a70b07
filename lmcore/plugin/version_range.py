"""Ranges of versions that a plugin works with, such as ">=1.1,<2".

Bounds of plain releases are compared here: `packaging`, which reads every other form, takes longer
to import than a whole plugin.
"""

from __future__ import annotations

import re

__all__ = ["is_range", "within"]

_RELEASE = r"\d+(?:\.\d+)*"
_BOUNDS = re.compile(rf"\s*(?:>=|<)\s*{_RELEASE}\s*(?:,\s*(?:>=|<)\s*{_RELEASE}\s*)*", re.ASCII)
_BOUND = re.compile(rf"(>=|<)\s*({_RELEASE})", re.ASCII)
_VERSION = re.compile(rf"({_RELEASE})(?:\+[a-zA-Z0-9.]+)?", re.ASCII)


def is_range(text: str) -> bool:
    """Return True if a text is a version specifier."""
    if _BOUNDS.fullmatch(text):
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def within(version: str, specifier: str) -> bool:
    """Return True if the release of a version is within a range.

    Vendors' containers carry pre-releases with a local part ("2.12.0a0+c0ffee"); a range is about
    the release that follows them.

    Args:
        version: Version of an installed package.
        specifier: The range, for which `is_range` is True.
    """
    plain = _VERSION.fullmatch(version)
    if plain and _BOUNDS.fullmatch(specifier):
        release = _numbers(plain[1])
        return all(
            (release >= _numbers(bound)) == (operator == ">=")
            for operator, bound in _BOUND.findall(specifier)
        )
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(specifier).contains(Version(version).base_version, prereleases=True)


def _numbers(release: str) -> tuple[int, ...]:
    """Return a release as numbers; 2.0 and 2 are equal."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
