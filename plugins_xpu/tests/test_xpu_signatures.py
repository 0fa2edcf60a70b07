"""The names of torch that the plugin uses exist in every supported version and in stand-ins."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from lmcore_xpu.device import GRAPH

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parent / "src" / "lmcore_xpu").rglob("*.py"))
LATER = {"2.8.0": ("_xpu_canDeviceAccessPeer",)}
"""Compiled functions, which the plugin does not call, that older versions lack."""


@pytest.fixture
def recorded(each_recorded_torch):
    """Records of each supported version of torch."""
    return each_recorded_torch


def parameters(signature):
    """Return name, kind and default of each parameter."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in signature.parameters.values()
    ]


def written(text):
    """Return the signature of "(a, b=1)"; a default `...` means any."""
    return inspect.signature(eval(f"lambda {text[1:-1]}: None"))


def alike(one, other) -> bool:
    """Say whether two lists of parameters are the same, where their defaults are known."""
    return len(one) == len(other) and all(
        first[:2] == second[:2] and (... in {first[2], second[2]} or first[2] == second[2])
        for first, second in zip(one, other, strict=True)
    )


def test_the_record_is_what_is_installed(installed_torch):
    """Every recorded function of the installed torch has the recorded parameters."""
    count = 0
    for module, functions in installed_torch["signatures"].items():
        loaded = importlib.import_module(module)
        for name, text in functions.items():
            found = loaded
            for part in name.split("."):
                found = inspect.getattr_static(found, part, None) or getattr(found, part)
            found = getattr(found, "__func__", found)  # `__new__`
            live = parameters(inspect.signature(found))
            assert alike(live, parameters(written(text))), f"{module}.{name}: {live} {text}"
            count += 1
    assert count > 140


def test_the_record_of_each_version_is_complete(recorded):
    """Oldest and newest have the functions that every device needs."""
    functions = recorded["signatures"]["torch.xpu"]
    assert functions["set_device"] == "(device)"
    assert functions["is_bf16_supported"] == "(including_emulation=True)"
    assert functions["get_rng_state"] == "(device='xpu')"
    assert functions["Stream.__new__"] == "(cls, device=None, priority=0, **kwargs)"
    assert recorded["signatures"]["torch.distributed"]["is_xccl_available"] == "()"
    assert "total_memory" in recorded["device_properties"]


def test_the_drivers_functions_are_those_of_torchs_stubs(xpu, recorded):
    """Each function of the stand-in is one of torch's compiled part, with its parameters."""
    for name, function in xpu.functions().items():
        if name not in recorded["compiled"]:
            assert name in LATER.get(recorded["torch"], ())
            continue
        ours = [parameter[0] for parameter in parameters(inspect.signature(function))]
        theirs = [parameter[0] for parameter in parameters(written(recorded["compiled"][name]))]
        assert ours == theirs, name


def test_the_drivers_record_has_the_fields_of_each_version(recorded):
    """A card has a value for every field that a version of torch has."""
    from fake_torch_xpu import Card

    assert set(recorded["device_properties"]) <= set(Card().fields())


def dotted(node) -> str | None:
    """Return "torch.xpu.empty_cache" of such an expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return None


def known_names(tree: ast.Module) -> dict[str, str]:
    """Return the meaning of each name that a module, or a function in it, imports of torch."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports = [alias for alias in node.names if alias.name.partition(".")[0] == "torch"]
            known |= {
                alias.asname or "torch": alias.name if alias.asname else "torch"
                for alias in imports
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return known


def full_name(node, known: dict[str, str]) -> str | None:
    """Return "torch.nn.functional.gelu" of `F.gelu`, None of what is not torch's."""
    first, _, attributes = (dotted(node) or "").partition(".")
    return f"{known[first]}.{attributes}".rstrip(".") if first in known else None


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield the names of torch that a module asks for: "torch.xpu.empty_cache".

    What is looked up by `getattr(torch.xpu, "power_draw", None)` is not asked for.
    """
    known = known_names(tree)
    yield from known.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full_name(node, known)):
            yield name


def misfits(tree: ast.Module, recorded) -> Iterator[str]:
    """Yield the calls of recorded functions that do not fit their parameters."""
    known = known_names(tree)
    for node in ast.walk(tree):
        module, _, last = (
            (isinstance(node, ast.Call) and full_name(node.func, known)) or ""
        ).rpartition(".")
        text = recorded["signatures"].get(module, {}).get(last)
        if text is None or any(isinstance(arg, ast.Starred) for arg in node.args):
            continue
        try:
            keywords = {keyword.arg: 0 for keyword in node.keywords if keyword.arg}
            written(text).bind(*node.args, **keywords)
        except TypeError as error:
            yield f"{module}.{last}{text}: {error}"


def lacking(name: str, recorded) -> str | None:
    """Return None, or what a version does not have of "torch.xpu.empty_cache().x"."""
    module, names = "torch", name.split(".")[1:]
    if names[:1] == ["ops"]:  # made by the compiled part; what is installed must do
        operator.attrgetter(".".join(names))(torch)
        return None
    for place, part in enumerate(names):
        if part.startswith("__"):
            return None
        known = recorded["names"].get(module)
        if known is None:
            return f"`{module}` is not recorded: add it to `record_signatures.py`"
        if part not in known.split():
            return f"`{module}` has no `{part}`"
        below = f"{module}.{part}"
        if below not in recorded["names"]:
            return None if place == len(names) - 1 or is_value(below) else below_is(below)
        module = below
    return None


def is_value(name: str) -> bool:
    """Say whether a name is something that has attributes and is no module."""
    module, _, last = name.rpartition(".")
    return not inspect.ismodule(getattr(importlib.import_module(module), last, None))


def below_is(name: str) -> str:
    return f"`{name}` is not recorded: add it to `record_signatures.py`"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_version_has_what_the_plugin_asks_for(source, recorded):
    """No source names something of torch that a version lacks, or calls it as that does not."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found = set(uses(tree))
    missing = {name: lacking(name, recorded) for name in found}
    if Version(recorded["torch"]) < Version(GRAPH.since):  # asked before it is used
        assert missing.pop("torch.xpu.XPUGraph", "not used")
    assert {name: why for name, why in missing.items() if why} == {}
    assert list(misfits(tree, recorded)) == []


def test_a_name_that_a_version_lacks_is_found(recorded_torch):
    """The check above sees attributes, imports and other names of modules."""
    text = """
import torch
from torch import xpu as gpu
from torch.nn import functional as F
gpu.power_draw()
torch.xpu.no_such()
F.linear_cross_entropy()
torch.float32
torch.cuda.is_available()
"""
    found = {name: lacking(name, recorded_torch("2.11.0")) for name in uses(ast.parse(text))}
    assert {name: why for name, why in found.items() if why} == {
        "torch.xpu.power_draw": "`torch.xpu` has no `power_draw`",
        "torch.xpu.no_such": "`torch.xpu` has no `no_such`",
        "torch.nn.functional.linear_cross_entropy":
            "`torch.nn.functional` has no `linear_cross_entropy`",
        "torch.cuda.is_available": below_is("torch.cuda"),
    }  # fmt: skip
    newest = recorded_torch("2.13.0")
    assert lacking("torch.xpu.power_draw", newest) is None


def test_a_call_that_does_not_fit_is_found(recorded_torch):
    """Too many arguments, and unknown ones, do not fit a recorded signature."""
    text = """
import torch
torch.xpu.empty_cache(0)
torch.xpu.set_device(index=0)
torch.xpu.synchronize()
torch.distributed.barrier(device_ids=[0], timeout=None)
"""
    tree = ast.parse(text)
    assert len(list(misfits(tree, recorded_torch("2.11.0")))) == 3
    assert len(list(misfits(tree, recorded_torch("2.13.0")))) == 2
