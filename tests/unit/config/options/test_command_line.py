"""Flags from options: the grammar, and every problem reported at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.option import REQUIRED, option, options_of
from lmcore.config.options.command_line import (
    ForeignFlag,
    ParsedFlags,
    Positional,
    Translation,
    parse_flags,
    parse_section,
    wants_help,
)


@dataclass(frozen=True)
class Sample:
    """Do a thing.

    More about it.
    """

    prefix: str = option(REQUIRED, "Where.")
    lr: float = option(0.1, "Rate.", above=-10)
    top_p: float = option(0.0, "Share.")
    items: tuple[str, ...] = option((), "Items.")
    text: str | None = option(None, "Text.", may_be_empty=True)
    fast: bool = option(False, "Fast.")
    save_optim: bool = option(True, "Save.")


OPTIONS = {one.name: one for one in options_of(Sample)}
FILES = Positional("files", maximum=None)


def parse(line: str, *, positionals: tuple[Positional, ...] = (FILES,)) -> ParsedFlags:
    return parse_flags(line.split(), OPTIONS, positionals=positionals, foreign=FOREIGN)


def _old(values: tuple[str, ...]) -> Translation:
    return Translation(("--lr", *values))


FOREIGN = {
    "--rate": ForeignFlag("+", _old, "--lr"),
    "--gone": ForeignFlag("*", lambda _: Translation(problem=ConfigError("`--gone` is gone"))),
    "--same": ForeignFlag("0", lambda _: Translation(no_effect="always so")),
    "--also": ForeignFlag("0", lambda _: Translation(no_effect="always so")),
}


@pytest.mark.parametrize(
    "line,values",
    [
        ("--lr 1e-3", {"lr": 1e-3}),
        ("--lr=1e-3", {"lr": 1e-3}),
        ("--lr -1.5", {"lr": -1.5}),
        ("--lr -.5", {"lr": -0.5}),
        ("--top_p 0.9", {"top_p": 0.9}),
        ("--top-p=0.9", {"top_p": 0.9}),
        ("--items a b c", {"items": ("a", "b", "c")}),
        ("--items a --items b", {"items": ("a", "b")}),
        ("--items=a --items=b", {"items": ("a", "b")}),
        ("--items - -5", {"items": ("-", "-5")}),
        ("--text -x", {"text": "-x"}),
        ("--text=--lr", {"text": "--lr"}),
        ("--text=", {"text": ""}),
        ("--fast", {"fast": True}),
        ("--fast true", {"fast": True}),
        ("--fast=false", {"fast": False}),
        ("--no-fast", {"fast": False}),
        ("--no_save_optim", {"save_optim": False}),
        ("--lr 1 --lr 1.0", {"lr": 1.0}),
        ("--rate 2", {"lr": 2.0}),
        ("--rate=2 --same", {"lr": 2.0}),
    ],
)
def test_grammar(line: str, values: dict[str, object]) -> None:
    """Every way to write a flag yields its value."""
    parsed = parse(line)
    assert parsed.problems == ()
    assert dict(parsed.values) == values
    assert parsed.positionals == {"files": ()}


@pytest.mark.parametrize(
    "line,words",
    [
        ("a.yaml --lr 1", ("a.yaml",)),
        ("--lr 1 a.yaml b.yaml", ("a.yaml", "b.yaml")),
        ("--fast a.yaml", ("a.yaml",)),
        ("--items x -- --lr", ("--lr",)),
        ("-- -h", ("-h",)),
        ("-", ("-",)),
        ("-3", ("-3",)),
    ],
)
def test_words_without_a_flag(line: str, words: tuple[str, ...]) -> None:
    """Words that belong to no flag are positional; `--` ends the flags."""
    parsed = parse(line)
    assert parsed.problems == ()
    assert parsed.positionals["files"] == words


@pytest.mark.parametrize(
    "line,messages",
    [
        ("--lrr 1", ["unknown flag `--lrr` did you mean `--lr`?"]),
        ("--sav-optim", ["unknown flag `--sav-optim` did you mean `--save-optim`?"]),
        ("--rat 3", ["unknown flag `--rat` did you mean `--rate`, which is `--lr` here?"]),
        ("--gon 3", ["unknown flag `--gon` `--help`"]),
        ("--sam", ["unknown flag `--sam` `--help`"]),
        ("--to 3", ["unknown flag `--to` did you mean `--top-p`?"]),
        ("--no-sa", ["unknown flag `--no-sa` did you mean `--no-save-optim`?"]),
        ("--t 3", ["unknown flag `--t` `--help` lists the flags"]),
        ("--learning-rate 3", ["unknown flag `--learning-rate` did you mean `--lr`?"]),
        ("--save", ["unknown flag `--save` "]),
        ("-z", ["unknown flag `-z` `--help` lists the flags"]),
        ("--qqqqq a b c", ["unknown flag `--qqqqq` `--help` lists the flags"]),
        ("--lr", ["`--lr` needs a value"]),
        ("--lr --fast", ["`--lr` needs a value"]),
        ("--items", ["`--items` needs a value"]),
        ("--rate 1 --lr 2", ["`--lr` is given more than once, with different values"]),
        ("--no-fast=1", ["`--no-fast=1`: a `--no-` flag takes no value"]),
        ("--lr abc", ["`--lr abc`: expected a number > -10"]),
        ("--gone 1 2", ["`--gone` is gone"]),
        ("--same=1", ["`--same=1`: `--same` takes no value"]),
        ("--rate", ["`--rate` needs a value"]),
        ("--rate abc", ["`--rate abc`: expected a number > -10"]),
        ("--lrr 1 --lr --top-p x", ["unknown flag", "`--lr` needs", "`--top-p x`"]),
    ],
)
def test_problems(line: str, messages: list[str]) -> None:
    """Each thing wrong is one problem, in reading order, and none hides another."""
    found = [f"{one.what} {one.hint or ''}" for one in parse(line).problems]
    assert len(found) == len(messages), found
    for text, start in zip(found, messages, strict=True):
        assert text.startswith(start)


def test_abbreviations_are_unknown() -> None:
    """`--ite` is not `--items`: a later option could change what an abbreviation means."""
    (problem,) = parse("--ite a").problems
    assert problem.what == "unknown flag `--ite`"


def test_texts_keep_what_was_typed() -> None:
    """Messages and sources can show the flag as its user wrote it, an old name too."""
    parsed = parse("--rate 2 --items a --items b --no-fast")
    assert dict(parsed.texts) == {
        "lr": "--rate 2",
        "items": "--items a --items b",
        "fast": "--no-fast",
    }
    assert parsed.notices == (
        "1 Megatron flag was translated: `--rate 2` -> `--lr 2`",
        "`--items a` and `--items b` are joined: a list is extended",
    )


@pytest.mark.parametrize(
    "line,name,value,note",
    [
        ("--lr 1 --lr 2", "lr", 2.0, "`--lr 2` (not `--lr 1`)"),
        ("--lr 1 --lr 3 --same --lr 2", "lr", 2.0, "`--lr 2` (not `--lr 1`, `--lr 3`)"),
        ("--lr 1 --lr 2 --lr=1", "lr", 1.0, "`--lr 1` (not `--lr 2`)"),
        ("--rate 1 --rate 2", "lr", 2.0, "`--rate 2` (not `--rate 1`)"),
        ("--rate 1 --lr 2 --rate 2", "lr", 2.0, "`--rate 2` (not `--rate 1`)"),
        ("--fast --no-fast", "fast", False, "`--no-fast` (not `--fast`)"),
        ("--top_p 1 --top-p=2", "top_p", 2.0, "`--top-p 2` (not `--top-p 1`)"),
    ],
)
def test_the_last_of_repeated_flags_counts(line: str, name: str, value: object, note: str) -> None:
    """A repeated flag has its last value, as with argparse, and one line names the others."""
    parsed = parse(line)
    assert not parsed.problems
    assert parsed.values[name] == value
    assert parsed.notices[-1] == f"given more than once, the last value counts: {note}"


def test_a_replaced_flag_is_not_called_translated() -> None:
    """Of two values of a renamed flag, the line about translations has the one that counts."""
    assert parse("--rate 1 --rate 2").notices == (
        "1 Megatron flag was translated: `--rate 2` -> `--lr 2`",
        "given more than once, the last value counts: `--rate 2` (not `--rate 1`)",
    )


def test_all_repeated_flags_are_in_one_line() -> None:
    """Overrides appended to a long command are named together; equal values need no line."""
    parsed = parse("--lr 1 --top-p 3 --same --lr 2 --top-p 4 --text x --text x")
    assert parsed.notices[-1] == (
        "given more than once, the last value counts: `--lr 2` (not `--lr 1`), "
        "`--top-p 4` (not `--top-p 3`)"
    )


def test_two_flags_of_one_option_contradict_each_other() -> None:
    """An old and a new name are two settings in Megatron: their last values must agree."""
    (problem,) = parse("--lr 3 --rate 1 --lr 2").problems
    assert problem.why == "found `--lr 2` and `--rate 1`"


def test_a_wrong_value_is_not_hidden_by_a_later_one() -> None:
    """Every value of a repeated flag is checked."""
    (problem,) = parse("--same --lr abc --lr 2").problems
    assert problem.what.startswith("`--lr abc`")


@pytest.mark.parametrize(
    "line,unread",
    [
        ("--lr abc", {"lr"}),
        ("--lr", {"lr"}),
        ("--rate", {"lr"}),
        ("--lrr 1", {"lr"}),
        ("--no-fast=1", {"fast"}),
        ("--lr 1 --rate 2", {"lr"}),
        ("--lr 1 --lr 2", set()),
        ("--gone 1", set()),
        ("--lr 1", set()),
    ],
)
def test_options_that_were_not_read(line: str, unread: set[str]) -> None:
    """The result names the options whose values a problem leaves unknown."""
    assert parse(line).unread == unread


def test_foreign_flags_are_reported_in_two_messages() -> None:
    """All translated flags are in one line; those without effect are grouped by their reason."""
    parsed = parse("--rate 2 --same --also")
    assert parsed.notices == (
        "1 Megatron flag was translated: `--rate 2` -> `--lr 2`",
        "2 flags change nothing here:\n  `--same`, `--also`: always so",
    )


def test_positional_counts() -> None:
    """Missing and surplus words are problems; later minima are served before optional words."""
    two = (Positional("first", maximum=None), Positional("last", minimum=1))
    assert parse("a b c", positionals=two).positionals == {"first": ("a", "b"), "last": ("c",)}
    assert [one.what for one in parse("", positionals=two).problems] == ["missing argument `last`"]
    one = (Positional("only"),)
    assert [p.what for p in parse("a b", positionals=one).problems] == ["unexpected argument `b`"]


def test_unknown_flag_does_not_blame_positionals() -> None:
    """An unknown flag may have taken the positional word, so that only the flag is reported."""
    needed = (Positional("prefix", minimum=1),)
    (problem,) = parse("--forse yes", positionals=needed).problems
    assert problem.what == "unknown flag `--forse`"


def test_parse_section() -> None:
    """A small command's dataclass is filled from flags and positional words."""
    sample = parse_section(
        Sample, ["--lr", "2", "out"], command="lmcore thing", positionals=["prefix"]
    )
    assert sample == Sample(prefix="out", lr=2.0)


def test_parse_section_reports_all() -> None:
    """Missing and wrong values of a small command come in one error."""
    with pytest.raises(ConfigError) as caught:
        parse_section(Sample, ["--lr", "x", "--top-p", "y"], command="lmcore thing")
    problems = [caught.value, *caught.value.others]
    assert [one.what for one in problems] == [
        "`--lr x`: expected a number > -10",
        "`--top-p y`: expected a number",
        "`--prefix` is required",
    ]
    assert (problems[-1].why, problems[-1].hint) == (None, "`--prefix TEXT`: Where.")


def test_parse_section_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints the summary, the usage and every option, and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        parse_section(Sample, ["--lr", "x", "-h"], command="lmcore thing", positionals=["prefix"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Do a thing.\n\nusage: lmcore thing PREFIX [--flags]\n")
    for one in OPTIONS.values():
        shown = one.name.upper() if one.name == "prefix" else one.flag[2:]
        assert shown in text


def test_usage_of_optional_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage line has optional arguments in brackets, and dots after lists."""

    @dataclass(frozen=True)
    class Listing:
        """List things."""

        name: tuple[str, ...] = option((), "Things to list.")

    with pytest.raises(SystemExit):
        parse_section(Listing, ["--help"], command="lmcore list", positionals=["name"])
    assert "usage: lmcore list [NAME ...] [--flags]\n" in capsys.readouterr().out


def test_wants_help() -> None:
    """Help is asked for before `--`, not after it."""
    assert wants_help(["--lr", "1", "--help"])
    assert wants_help(["-h"])
    assert not wants_help(["--", "--help"])


@pytest.mark.parametrize("flag", ["--config", "--config_file", "--yaml-cfg=run.yaml"])
def test_flag_for_a_settings_file(flag: str) -> None:
    """Other programs' flag for a settings file is explained if the command takes such files."""
    files = (Positional("config.yaml", "YAML file of settings", maximum=None),)
    assert "a YAML file of settings without a flag" in str(
        parse(flag, positionals=files).problems[0].hint
    )
    assert "YAML" not in str(parse(flag).problems[0].hint)


def test_a_beginning_of_several_flags() -> None:
    """All are suggested, up to five, beside a flag that is nearly the same."""
    names = ("to", "token_file", "token_limit", *(f"nearly_{letter}" for letter in "gfedcba"))
    options = {name: replace(OPTIONS["text"], name=name) for name in names}
    hints = []
    for line in ("--tok x", "--nearly x"):
        parsed = parse_flags(line.split(), options, positionals=(FILES,), foreign=FOREIGN)
        hints += [problem.hint for problem in parsed.problems]
    shown = [f"`--nearly-{letter}`" for letter in "abcde"]
    assert hints == [
        "did you mean `--to`, `--token-file` or `--token-limit`?",
        f"did you mean {', '.join(shown[:4])} or {shown[4]}?",
    ]
