"""Mistakes in a plugin's hooks, each planted into a plugin that is right otherwise."""

from __future__ import annotations

import copy
import types

import pytest

from lmcore.hookspecs import hookimpl
from lmcore_conformance.contract.snapshot import describe_contract, load_contract
from lmcore_conformance.plugin_check.hooks import check_hooks, implementations

CONTRACT = describe_contract()


def plugin(**functions):
    """Return a plugin that brings a device, with these functions too; None leaves one out."""

    @hookimpl
    def lmcore_plugin_info(): ...

    @hookimpl
    def lmcore_probe(env): ...

    @hookimpl
    def lmcore_create_device(probe, config): ...

    @hookimpl
    def lmcore_comm_backends(): ...

    @hookimpl
    def lmcore_precision_policies(device): ...

    @hookimpl
    def lmcore_recompute_policies(): ...

    members = {name: value for name, value in locals().items() if name != "functions"} | functions
    return types.SimpleNamespace(
        **{name: value for name, value in members.items() if value is not None}
    )


def findings(subject, contract=CONTRACT):
    return [finding for finding in check_hooks(subject, contract) if finding.status != "ok"]


def test_a_plugin_without_mistakes_has_none():
    """Any subset of the arguments will do, and the line says how many hooks there are."""
    assert findings(plugin()) == []
    (line,) = check_hooks(plugin(), CONTRACT)
    assert line.detail == f"6 hooks as version {CONTRACT['api']} of the contract specifies"


def unknown(probing): ...
def defaulted(env=None): ...
def by_name(*, env): ...
def catching(**everything): ...
def generator(env):
    yield env


def wrapping(env):
    yield env


async def later(env): ...  # fmt: skip


@pytest.mark.parametrize(
    "name, function, message, fix",
    [
        ("lmcore_prob", hookimpl(lambda: None), "no such hook", "`lmcore_probe`"),
        ("lmcore_frobnicate", hookimpl(lambda: None), "no such hook", "remove the mark"),
        ("probe_", hookimpl(lambda: None), "no such hook", ""),
        ("lmcore_op_impl", lambda device: None, "no such hook", "`lmcore_op_impls`"),
        ("lmcore_doctor", lambda: None, "not marked with `@hookimpl`", "import hookimpl"),
        ("lmcore_probe", hookimpl(unknown), "no argument `probing`; its arguments: `env`", ""),
        ("lmcore_probe", hookimpl(lambda enf: None), "no argument `enf`", "did you mean `env`?"),
        ("lmcore_plugin_info", hookimpl(lambda env: None), "its arguments: none", ""),
        ("lmcore_probe", hookimpl(defaulted), "`env` has a default, so it is never passed", ""),
        ("lmcore_probe", hookimpl(by_name), "`env` comes after `*`, so it is never passed", ""),
        ("lmcore_probe", hookimpl(catching), "`**everything` never gets anything", ""),
        ("lmcore_probe", hookimpl(wrapper=True)(wrapping), "it is a wrapper", ""),
        ("lmcore_probe", hookimpl(generator), "it is a generator", ""),
        ("lmcore_probe", hookimpl(later), "it is `async`", ""),
    ],
)
def test_a_mistake_is_named_with_its_fix(name, function, message, fix):
    """The finding has the hook, the mistake, and the probable name if there is a similar one."""
    (found,) = findings(plugin(**{name: function}))
    assert (found.name, found.status) == (name, "failed")
    assert message in found.detail
    assert fix in (found.fix or "")


def test_a_function_that_only_has_the_prefix_is_a_warning():
    """It works today, and a later version might take it for a hook."""
    (found,) = findings(plugin(lmcore_weigh_the_anchor=lambda: None))
    assert (found.name, found.status) == ("lmcore_weigh_the_anchor", "warning")


def test_an_imported_module_with_the_prefix_is_nothing():
    """`import lmcore_cpu` makes no hook."""
    assert findings(plugin(lmcore_mine=types)) == []


def test_several_mistakes_are_all_named():
    """Registration would stop at the first."""
    subject = plugin(lmcore_probe=hookimpl(unknown), lmcore_doctor=lambda: None, lmcore_prob=None)
    assert {finding.name for finding in findings(subject)} == {"lmcore_probe", "lmcore_doctor"}


@pytest.mark.parametrize(
    "missing, status, message",
    [
        ("lmcore_plugin_info", "failed", "the one that every plugin needs"),
        ("lmcore_probe", "failed", "the device can never be chosen"),
        ("lmcore_create_device", "failed", "cannot be created"),
    ],
)
def test_a_hook_that_belongs_to_others_is_missed(missing, status, message):
    """A plugin that brings a device has the three hooks that it needs."""
    (found,) = findings(plugin(**{missing: None}))
    assert (found.name, found.status) == (missing, status)
    assert message in found.detail


@pytest.mark.parametrize(
    "missing, status, message",
    [
        ("lmcore_precision_policies", "failed", "without a precision"),
        ("lmcore_recompute_policies", "failed", "without the policy `none`"),
        ("lmcore_comm_backends", "warning", "one process"),
    ],
)
def test_the_first_version_has_no_defaults(missing, status, message):
    """For version 1.0 a plugin that brings a device brings all that a run on it needs."""
    subject = plugin(**{missing: None})
    assert findings(subject) == []
    (found,) = findings(subject, load_contract("1.0"))
    assert (found.name, found.status) == (missing, status)
    assert message in found.detail


def test_an_extension_needs_no_device_hooks():
    """A plugin without a probe may have its info and one other hook."""
    subject = types.SimpleNamespace(
        lmcore_plugin_info=plugin().lmcore_plugin_info,
        lmcore_op_impls=hookimpl(lambda device: []),
    )
    assert findings(subject) == []


def test_a_name_in_the_mark_counts():
    """`hookimpl(specname=...)` is a hook by another name."""

    @hookimpl(specname="lmcore_doctor")
    def look(probe): ...

    assert findings(plugin(look=look)) == []
    hooks = [implementation.hook for implementation in implementations(plugin(look=look))]
    assert "lmcore_doctor" in hooks


def test_methods_of_an_object_are_hooks_too():
    """An entry point may name an instance; `self` is no argument."""

    class Plugin:
        @hookimpl
        def lmcore_plugin_info(self): ...

        @hookimpl
        def lmcore_doctor(self, probe): ...

    assert findings(Plugin()) == []


def test_an_older_contract_lacks_what_came_later():
    """A hook or argument is a finding if the older version does not have it."""
    old = copy.deepcopy(CONTRACT)
    old["api"] = "0.9"
    del old["hooks"]["lmcore_doctor"]
    old["hooks"]["lmcore_create_device"]["arguments"].pop("config")
    subject = plugin(lmcore_doctor=hookimpl(lambda probe: []))
    found = {finding.name: finding for finding in findings(subject, old)}
    assert set(found) == {"lmcore_doctor", "lmcore_create_device"}
    assert "version 0.9 of the contract does not have this hook; it came later" in (
        found["lmcore_doctor"].detail
    )
    assert "in version 0.9 it has no argument `config`" in found["lmcore_create_device"].detail
