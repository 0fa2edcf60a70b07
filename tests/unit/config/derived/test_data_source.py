"""The words that name a run's datasets: weights, ranges, and what is wrong with them."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.derived.data_source import Blend, DataSource, overlapping_ranges
from lmcore.config.load import load_config


def sources_of(*argv: str):
    found, problems = load_config(list(argv)).sources
    if problems:
        raise ConfigError.collect(problems)
    return found


@pytest.mark.parametrize(
    "words, expected",
    [
        ("a", [("a", None)]),
        ("a b", [("a", None), ("b", None)]),
        ("a b c", [("a", None), ("b", None), ("c", None)]),
        ("1 a", [("a", 1.0)]),
        ("0.3 a 0.7 b", [("a", 0.3), ("b", 0.7)]),
        ("30 a 7e1 b", [("a", 30.0), ("b", 70.0)]),
    ],
)
def test_data_path(words, expected):
    """Weights and prefixes in turn, or prefixes alone."""
    (found,) = sources_of("--data-path", *words.split()).blends()
    assert [(one.name, one.weight) for one in found.sources] == expected


@pytest.mark.parametrize(
    "words, what",
    [
        ("-1 a 2 b", "`--data-path`: the weight of `a` is -1"),
        ("0 a 1 b", "`--data-path`: the weight of `a` is 0"),
        ("nan a 1 b", "`--data-path`: the weight of `a` is nan"),
        ("inf a 1 b", "`--data-path`: the weight of `a` is inf"),
        ("1e308 a 1e308 b", "`--data-path`: the weight of `a` is 1e308"),
        ("0,5 a 0.5 b", "`--data-path 0,5 a 0.5 b`: found `0,5` instead of a weight"),
        ("a 0.5 b", "`--data-path a 0.5 b`: found `a` instead of a weight"),
        ("0.5 a b", "`--data-path 0.5 a b`: found `b` instead of a weight"),
        ("0.5 0.5 a b", "`--data-path 0.5 0.5 a b`: found `0.5` instead of a dataset"),
        ("0.5 a 0.5", "`--data-path 0.5 a 0.5`: no dataset follows the weight `0.5`"),
    ],
)
def test_data_path_that_cannot_be_read(words, what):
    """A weight that is negative, zero, not finite or none, and weights for some alone."""
    with pytest.raises(ConfigError) as caught:
        sources_of("--data-path", *words.split())
    assert caught.value.what == what
    assert caught.value.hint


def test_weighted_split_paths():
    """Upstream's text: a name, then weight, range and path of each dataset."""

    def blend(*words: str) -> Blend:
        return sources_of("--train-weighted-split-paths", *words).own["train"]

    first = blend("TRAIN: 0.3 0:0.6 a, 0.7 0.5:1 b")
    assert first.title == "TRAIN"
    assert first.sources == (DataSource("a", 0.3, (0, 0.6)), DataSource("b", 0.7, (0.5, 1)))
    second = blend("T2:2 0:1 c,1 0.5:1 b")
    assert second.title == "T2"
    assert second.sources == (DataSource("c", 2, (0, 1)), DataSource("b", 1, (0.5, 1)))
    split_by_the_shell = ["T:", "1", "0:1", "a,", "1", "0:1", "b"]
    assert len(blend(*split_by_the_shell).sources) == 2


@pytest.mark.parametrize(
    "text, part",
    [
        ("0.3 0:0.6 a", "cannot be read"),
        ("T:", "cannot be read"),
        ("T: 0.3 a", "cannot be read"),
        ("T: 0.3 0:1 a b", "cannot be read"),
        ("T: x 0:1 a", "`x` is not a weight, for `a`"),
        ("T: 0 0:1 a", "the weight of `a` is 0"),
        ("T: -2 0:1 a", "the weight of `a` is -2"),
        ("T: 1 0-1 a", "`0-1` is not a range"),
        ("T: 1 0.6:0.6 a", "is empty or goes beyond"),
        ("T: 1 0.6:0.5 a", "is empty or goes beyond"),
        ("T: 1 0:1.5 a", "is empty or goes beyond"),
        ("T: 1 -0.5:1 a", "is empty or goes beyond"),
        ("T: 1 0:nan a", "is empty or goes beyond"),
    ],
)
def test_weighted_split_paths_that_cannot_be_read(text, part):
    """Problems name the flag."""
    with pytest.raises(ConfigError) as caught:
        sources_of("--valid-weighted-split-paths", text)
    assert part in caught.value.what
    assert "--valid-weighted-split-paths" in caught.value.what


def test_one_blend_of_each_part():
    """Several blends for the test are refused, never one of them ignored."""
    with pytest.raises(ConfigError, match="names 2 blends: `V1`, `V2`"):
        sources_of("--test-weighted-split-paths", "V1: 1 0:1 a", "V2: 1 0:1 b")
    with pytest.raises(ConfigError, match="two blends of the name `V`"):
        sources_of("--valid-weighted-split-paths", "V: 1 0:1 a", "V: 1 0:1 b")


def test_named_validation_sets():
    """They are beside the parts: by name and prefix, or several names of ranges."""
    data = ("--data-path", "a")
    found = sources_of(*data, "--valid-data", "b=x/b.bin", "c.1=a")
    assert found.own == {}
    assert {name: one.sources for name, one in found.sets.items()} == {
        "b": (DataSource("x/b"),),
        "c.1": (DataSource("a"),),
    }
    assert found.sets["b"].note == ""
    assert found.sets["c.1"].note.endswith("trained on documents of this data set, too")
    assert not found.validates_on_sets_alone
    assert sources_of(*data, "--split", "1,0,0", "--valid-data", "b=b").validates_on_sets_alone
    train, flag = ("--train-data-path", "a"), "--valid-weighted-split-paths"
    ranges = sources_of(*train, flag, "V: 1 0:1 b", "W W: 1 0:0.5 b, 1 0:1 c")
    assert list(ranges.sets) == ["V", "W W"]
    assert ranges.validates_on_sets_alone
    assert list(overlapping_ranges(ranges)) == []
    assert sources_of(*train, flag, "V: 1 0:1 b").sets == {}
    mixed = sources_of(*train, "--valid-data", "wiki", "b=b")
    assert mixed.own["valid"].sources == (DataSource("wiki", corpus=True),)
    assert list(mixed.sets) == ["b"]


@pytest.mark.parametrize(
    "words, part",
    [
        (["b=x", "b=y"], "`--valid-data b=y`: there are two validation sets `b`"),
        (["b c=x"], "`--valid-data b c=x` is not NAME=PREFIX"),
        (["=x"], "`--valid-data =x` is not NAME=PREFIX"),
        (["b="], "`--valid-data b=` is not NAME=PREFIX"),
    ],
)
def test_validation_sets_that_cannot_be_read(words, part):
    """Names are plain, and come once."""
    with pytest.raises(ConfigError) as caught:
        sources_of("--data-path", "a", "--valid-data", *words)
    assert part in caught.value.what


def test_which_sources_a_run_has():
    """Shared ones are divided by the split; a part may have its own."""
    (bundled,) = sources_of().blends()
    assert bundled.sources == (DataSource("shakespeare", corpus=True),)
    assert sources_of().bundled
    assert not sources_of("--corpus", "shakespeare").bundled
    shared = sources_of("--data-path", "a", "b")
    assert shared.divided is not None
    assert [one.name for one in shared.divided.sources] == ["a", "b"]
    assert shared.own == {}
    own = sources_of("--train-data-path", "1", "a", "--valid-data", "wiki")
    assert own.divided is None
    assert {part: blend.flag for part, blend in own.own.items()} == {
        "train": "--train-data-path",
        "valid": "--valid-data",
    }
    assert own.own["valid"].sources == (DataSource("wiki", corpus=True),)
    alone = sources_of("--train-data", "wiki", "web")
    assert alone.divided is not None
    assert [one.name for one in alone.divided.sources] == ["wiki", "web"]
    listed = sources_of("--data-file-list", "list.txt").divided
    assert listed is not None
    assert (listed.file_list, listed.sources) == ("list.txt", ())


def test_overlapping_ranges():
    """Documents in two ranges are a problem, also across parts; neighbours are none."""
    train, valid = "--train-weighted-split-paths", "--valid-weighted-split-paths"
    good = sources_of(train, "T: 1 0:0.5 a, 1 0.5:0.9 a, 1 0:1 b", valid, "V: 1 0.9:1 a")
    assert list(overlapping_ranges(good)) == []
    bad = sources_of(train, "T: 1 0:0.5 a, 1 0.4:0.9 a", valid, "V: 1 0.8:1 a")
    first, second = (one.what for one in overlapping_ranges(bad))
    assert first.startswith("`0:0.5` of `--train-weighted-split-paths` and `0.4:0.9` of ")
    assert second.startswith("`0.4:0.9` of `--train-weighted-split-paths` and `0.8:1` of `--valid")
    assert second.endswith("have documents of `a` in common")
