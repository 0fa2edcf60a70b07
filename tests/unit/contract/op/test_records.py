"""Kernels as records: what is malformed, what loads, and how preferences are written."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError, PluginError
from lmcore.contract import OpImpl, OpSpec
from lmcore.contract.op.records import (
    impl_problem,
    load_target,
    missing_packages,
    parse_preferences,
)


def impl(**fields):
    return OpImpl(**{"op": "root", "id": "quick", "load": "math:sin", **fields})


def test_a_module_that_raises_anything_at_import_is_a_plugin_error(tmp_path, monkeypatch):
    """A library that does not load raises OSError, which is as fatal to a kernel."""
    (tmp_path / "kernel_that_raises.py").write_text('raise OSError("libk.so.1")', encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="kernel_that_raises:f") as error:
        load_target("kernel_that_raises:f")
    assert "OSError: libk.so.1" in error.value.why


def test_a_module_that_ends_the_process_at_import_is_a_plugin_error(tmp_path, monkeypatch):
    """A module that calls `sys.exit` must not end the run without a word."""
    (tmp_path / "kernel_that_exits.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as error:
        load_target("kernel_that_exits:f")
    assert "SystemExit: 3" in error.value.why


@pytest.mark.parametrize("target", ["nonesuch:x", "math:nonesuch", "math", "", "math:pi", "math:"])
def test_what_is_no_callable_is_not_loaded(target):
    """An error names the target, for each kind of wrong target."""
    with pytest.raises(PluginError, match=f"`{target}`"):
        load_target(target)


@pytest.mark.parametrize(
    "field, value",
    [
        ("op", ""),
        ("op", None),
        ("id", "two words"),
        ("id", "a=b"),
        ("id", "a,b"),
        ("id", 3),
        ("load", len),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", True),
        ("requires", "json"),
        ("requires", ("json", 3)),
        ("supports", True),
        ("traits", "fused"),
        ("traits", ["fused"]),
        ("traits", frozenset({1})),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(field, value):
    """A record that cannot work is distinguished from one that can, before anything uses it."""
    problem = impl_problem(impl(**{field: value}))
    assert problem is not None
    assert f"its `{field}` is {value!r}" in problem


def test_a_whole_record_has_no_problem():
    """Every field of a right kind, lists and sets among them, is accepted."""
    whole = impl(
        priority=-1, requires=["json"], supports=lambda context: None, traits={"fused"}, plugin="a"
    )
    assert impl_problem(whole) is None
    assert impl_problem(impl()) is None


def test_missing_packages_are_found_without_an_import():
    """A name whose parent is missing, or that is no module's, counts as not installed."""
    names = ("json", "json.decoder", "nonesuch_1", "nonesuch_2.sub")
    assert missing_packages(impl(requires=names)) == ["nonesuch_1", "nonesuch_2.sub"]


def test_an_op_has_a_backward_pass_where_gradients_flow():
    """An op without arguments that get gradients has none."""
    assert OpSpec("root", "math:sqrt", "(x) -> y", "", {}, gradients=("x",)).has_backward
    assert not OpSpec("root", "math:sqrt", "(x) -> y", "", {}).has_backward


def test_preferences_are_parsed():
    """`op=id,id` with blanks forgiven."""
    assert parse_preferences(["root=a, b", "power=reference"]) == {
        "root": ("a", "b"), "power": ("reference",)
    }  # fmt: skip


@pytest.mark.parametrize("entries", [["root"], ["root="], ["=a"], ["root=,"], ["root=a", "root=b"]])
def test_garbled_preferences_are_errors(entries):
    """An entry that is no preference is shown as typed."""
    with pytest.raises(ConfigError, match="--ops"):
        parse_preferences(entries)
