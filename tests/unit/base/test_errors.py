"""Words of error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import counted, nearest, suggestion, unreadable


@pytest.mark.parametrize(
    "number, expected",
    [
        (1, "1 second"),
        (1.0, "1 second"),
        (0, "0 seconds"),
        (0.5, "0.5 seconds"),
        (30.0, "30 seconds"),
        (1000, "1,000 seconds"),
    ],
)
def test_a_number_and_its_noun(number: float, expected: str) -> None:
    """The singular is for one alone."""
    assert counted(number, "second") == expected


def test_an_irregular_plural() -> None:
    assert counted(1, "directory", "directories") == "1 directory"
    assert counted(2, "directory", "directories") == "2 directories"


@pytest.mark.parametrize("name", ["layrnorm", "LAYERNROM", "layer-norm"])
def test_a_slip_in_another_case(name: str) -> None:
    """The case of letters is no part of a slip; the choice is shown as it is written."""
    assert nearest(name, ["LayerNorm", "RMSNorm"]) == "LayerNorm"


def test_each_choice_is_listed_once() -> None:
    """Also one that two sources name, such as a command of a package that is installed."""
    assert suggestion("x", ["ask", "data", "ask"]) == "known: `ask`, `data`"


@pytest.mark.parametrize(
    "name, meant",
    [
        ("gtp2", "did you mean `gpt2-124m` or `gpt2-345m`? "),
        ("gpt2", "did you mean `gpt2-124m` or `gpt2-345m`? "),
        ("gtp2-124m", "did you mean `gpt2-124m`? "),
        ("adma", "did you mean `adam`? "),
        ("g", ""),
        ("resnet", ""),
    ],
)
def test_a_slip_for_a_beginning(name: str, meant: str) -> None:
    """Names with the beginning are suggested if none is similar as a whole."""
    choices = ["adam", "bert-base", "gpt2-124m", "gpt2-345m"]
    listed = "known: `adam`, `bert-base`, `gpt2-124m`, `gpt2-345m`"
    assert suggestion(name, choices) == f"{meant}{listed}"


def test_reason_of_an_unreadable_file(tmp_path: Path) -> None:
    """It is in words, without the number of the error and the path, which the message names."""
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "a").read_text()
    assert unreadable(missing.value) == "No such file or directory"
    with pytest.raises(UnicodeDecodeError) as coded:
        b"ab\xff".decode()
    assert unreadable(coded.value).startswith("it has the byte 0xff ")
    assert unreadable(OSError("no number")) == "no number"
