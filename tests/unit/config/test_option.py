"""Options: declared once, converted and bounded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.option import REQUIRED, option, options_of
from lmcore.config.section import SECTIONS, run_options


@dataclass(frozen=True)
class Sample:
    """A section."""

    name: str = option(REQUIRED, "A name.")
    count: int = option(1, "A count.", minimum=1, maximum=9)
    rate: float = option(0.5, "A rate.", above=0, below=1)
    kind: str = option(
        "none",
        "A kind.",
        choices=("none", "some"),
        aliases={"any": "some"},
        refused={"all": "use `--kind some`"},
    )
    note: str | None = option(None, "A note.")
    items: tuple[str, ...] = option((), "Items.")
    numbers: tuple[int, ...] = option((), "Numbers.", minimum=0)
    fast: bool = option(False, "Fast.")
    file: str = option("", "A path.", metavar="FILE")


OPTIONS = {one.name: one for one in options_of(Sample, name="sample")}


def convert(name: str, value: object) -> object:
    return OPTIONS[name].convert(value, where="here")


@pytest.mark.parametrize(
    "name,value,expected",
    [
        ("count", "3", 3),
        ("count", "1_0", None),
        ("count", 3.0, 3),
        ("rate", "1e-4", 1e-4),
        ("rate", 0.25, 0.25),
        ("kind", "any", "some"),
        ("kind", "Any", "some"),
        ("kind", "none", "none"),
        ("kind", "some", "some"),
        ("note", "none", None),
        ("note", None, None),
        ("note", 12, "12"),
        ("items", "one", ("one",)),
        ("items", ["a", "b"], ("a", "b")),
        ("numbers", ["1", 2], (1, 2)),
        ("fast", "true", True),
        ("fast", "off", False),
        ("fast", True, True),
        ("name", "none", "none"),
        ("name", "\udcc3\udcbc", "ü"),
        ("name", "ü \udc80", "ü \udc80"),
        ("items", ["\udcc3\udcbc"], ("ü",)),
        ("file", "\udcc3\udcbc", "\udcc3\udcbc"),
    ],
)
def test_converts_text_and_values(name: str, value: object, expected: object) -> None:
    """Text from a flag and values from a file become the field's type.

    The C locale leaves the bytes of UTF-8 as they are: text is decoded, a path is not.
    """
    if (name, value) == ("count", "1_0"):
        with pytest.raises(ConfigError, match="out of range"):  # 10 is over the maximum of 9
            convert(name, value)
    else:
        assert convert(name, value) == expected


@pytest.mark.parametrize(
    "name,value",
    [
        ("count", "0"),
        ("count", "10"),
        ("count", "1.5"),
        ("count", "three"),
        ("count", True),
        ("count", 2.5),
        ("count", None),
        ("count", "9" * 400),
        ("rate", "0"),
        ("rate", "1"),
        ("rate", "nan"),
        ("rate", "inf"),
        ("rate", "-inf"),
        ("rate", False),
        ("kind", "other"),
        ("fast", "maybe"),
        ("numbers", ["1", "-1"]),
        ("items", 5),
        ("name", ["a"]),
    ],
)
def test_refuses_wrong_values(name: str, value: object) -> None:
    """A value of the wrong type or out of range is a `ConfigError` that says where."""
    with pytest.raises(ConfigError, match="here"):
        convert(name, value)


def test_a_value_of_another_program() -> None:
    """It is refused with its own hint."""
    for value in ("all", "All"):
        with pytest.raises(ConfigError, match="here: not supported") as caught:
            convert("kind", value)
        assert caught.value.hint == "use `--kind some`"


def test_bound_and_type_in_words() -> None:
    """Bounds, choices and types are described for messages and docs."""
    assert OPTIONS["count"].bound == ">= 1 and <= 9"
    assert OPTIONS["rate"].bound == "> 0 and < 1"
    assert OPTIONS["kind"].bound == "one of none, some"
    assert OPTIONS["numbers"].type_name == "list of integers"
    assert OPTIONS["numbers"].expected == "expected integers >= 0"
    assert OPTIONS["rate"].expected == "expected a number > 0 and < 1"
    assert OPTIONS["count"].type_name == "integer"
    assert OPTIONS["name"].required
    assert not OPTIONS["note"].required


def test_names_are_unique_over_sections() -> None:
    """Every option of a run has a different flag, and none hides another's `--no-` form."""
    options = run_options()
    flags = [one.flag for one in options.values()]
    flags += [f"--no-{one.flag[2:]}" for one in options.values() if one.type is bool]
    assert len(set(flags)) == len(flags)
    assert sum(len(options_of(section)) for section in SECTIONS.values()) == len(options)


def test_defaults_are_valid() -> None:
    """Every default passes its option's own check, so that a written file reads back."""
    for one in run_options().values():
        assert one.convert(one.default, where=one.flag) == one.default


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that two sections share."""

    file: str | None = option(None, "A file.")
    size: int = option(1, "A size.")


@dataclass(frozen=True, kw_only=True)
class Building(Shared):
    """A section with its own options, one overriding an inherited option."""

    name: str = option(REQUIRED, "A name.")
    size: int = option(2, "Another size.")


def test_own_options_come_before_shared_ones() -> None:
    """A section's own options precede inherited ones, and override them."""
    found = options_of(Building)
    assert [one.name for one in found] == ["name", "size", "file"]
    assert found[1].default == 2
    assert found[1].help == "Another size."


@pytest.mark.parametrize("value, meant", [("smoe", "some"), ("anyy", "any")])
def test_a_misspelt_choice(value: str, meant: str) -> None:
    """The nearest choice or alias is suggested; choices alone are listed."""
    with pytest.raises(ConfigError, match="unknown choice") as caught:
        convert("kind", value)
    assert caught.value.hint == f"did you mean `{meant}`? known: `none`, `some`"
