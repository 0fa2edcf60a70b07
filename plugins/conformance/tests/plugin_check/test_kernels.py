"""Kernels that cannot be bound, or not be asked, each with its reason."""

from __future__ import annotations

import copy
import inspect
import sys
import types

import pytest

from lmcore.config.option import options_of
from lmcore.contract import OP_SPECS, OpAttributes, OpImpl, Reject
from lmcore.contract.op.records import load_target
from lmcore_conformance.contract.snapshot import describe_contract
from lmcore_conformance.plugin_check.kernels import check_kernels, contexts, reference_of

CONTRACT = describe_contract()
TARGET = "kernels_on_trial:rms_norm"


def rms_norm(x, weight, epsilon): ...
def too_short(x, weight): ...
def swapped(weight_H, x_BSH, epsilon): ...


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    module = types.ModuleType("kernels_on_trial")
    for function in (rms_norm, too_short, swapped):
        setattr(module, function.__name__, function)
    module.number = 3
    monkeypatch.setitem(sys.modules, module.__name__, module)


def checked(*kernels, contract=CONTRACT):
    return [
        (kernel.name, str(kernel.status), kernel.detail)
        for kernel in check_kernels(kernels, "chip", contract)
    ]


def kernel(**fields):
    return OpImpl(**({"op": "rms_norm", "id": "mine", "load": TARGET} | fields))


def test_a_kernel_that_can_be_bound_is_one_good_line():
    """It says how many cases the kernel does."""
    assert checked(kernel()) == [
        ("rms_norm=mine", "ok", f"`{TARGET}` does 16 of 16 cases"),
    ]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"op": "rms_nrom"}, "has no op `rms_nrom`; did you mean `rms_norm`?"),
        ({"id": "reference"}, "the id `reference` is the core's"),
        ({"id": "two words"}, "its `id` is 'two words'"),
        ({"priority": "high"}, "its `priority` is 'high', and an integer is wanted"),
        ({"traits": ("fused",)}, "its `traits` is"),
        ({"load": "nonesuch_module:rms_norm"}, "No module named 'nonesuch_module'"),
        ({"load": "kernels_on_trial:gone"}, "has no attribute 'gone'"),
        ({"load": "kernels_on_trial:number"}, "is not callable"),
        ({"load": "kernels_on_trial:too_short"}, "it takes 2 arguments by position"),
        ({"load": "kernels_on_trial:swapped"}, "its `weight_H` is in the place of"),
        ({"load": "lmcore.base.durable:sync"}, "its target `lmcore.base.durable:sync` is private"),
        ({"supports": lambda case: "no"}, "`supports` returned 'no', neither None nor a `Reject`"),
        ({"supports": lambda case: Reject("")}, "neither None nor a `Reject` with a reason"),
        ({"supports": lambda case: 1 // 0}, "`supports` raised ZeroDivisionError"),
    ],
)
def test_a_kernel_that_cannot_be_bound_is_reported_with_the_reason(fields, message):
    """Records, targets, signatures and answers are each checked."""
    found = checked(kernel(**fields))
    failed = [detail for _, status, detail in found if status == "failed"]
    assert len(failed) == 1
    assert message in failed[0]
    assert not [finding for finding in found if finding[1] == "ok"]


def test_one_wrong_answer_does_not_hide_another():
    """Each kind of wrong answer is reported once, with the number of its cases."""

    def supports(case):
        if case.dtype == "float16":
            raise TypeError("half")
        return "no" if case.dtype == "float64" else None

    (raised, returned) = checked(kernel(supports=supports))
    assert "`supports` raised TypeError: half, for float16, hidden_size=1024" in raised[2]
    assert "and for 3 other cases" in raised[2]
    assert "`supports` returned 'no'" in returned[2]
    assert "and for 3 other cases" in returned[2]


def test_a_case_without_attributes_is_supported():
    """A kernel that raises there is warned, for only a person's question has such a case."""

    def supports(case):
        return None if case.attributes["hidden_size"] else Reject("empty")

    warning, line = checked(kernel(supports=supports))
    assert warning[1] == "warning"
    assert "raised KeyError: 'hidden_size' for a case without attributes" in warning[2]
    assert line == ("rms_norm=mine", "ok", f"`{TARGET}` does 12 of 12 cases")


def test_two_kernels_of_one_id_are_refused():
    """The second one is at fault; the same id for another op is none."""
    first, second = checked(kernel(), kernel())
    assert first[1] == "ok"
    assert second[1] == "failed"
    assert "has another kernel with the id `mine`" in second[2]


def test_a_package_that_is_missing_skips_the_kernel():
    """It is not loaded, and its checks are skipped."""
    assert checked(kernel(requires=("nonesuch_package",))) == [
        ("rms_norm=mine", "skipped", "not loaded: it needs `nonesuch_package`, not installed"),
    ]


def test_compiled_code_is_reported_as_unchecked():
    """A function without a signature is skipped in that, and asked for its cases all the same."""
    skipped, line = checked(kernel(load="builtins:max"))
    assert skipped[1] == "skipped"
    assert "has no readable signature" in skipped[2]
    assert line[1] == "ok"


def test_a_kernel_that_does_nothing_is_a_warning():
    """Its reasons are shown."""
    (line,) = checked(kernel(supports=lambda case: Reject("the moon is full")))
    assert line == ("rms_norm=mine", "warning", f"`{TARGET}` does 0 of 16 cases: the moon is full")


def test_a_misspelt_trait_is_a_warning():
    """A trait with the plugin's own name passes; a near miss of a known one is a warning."""
    warning, _ = checked(kernel(traits=frozenset({"determinstic", "lunar"})))
    assert warning[:2] == ("rms_norm=mine", "warning")
    assert "`determinstic`" in warning[2]


def test_no_kernels_are_no_fault():
    """An empty list is what the contract allows."""
    assert checked() == [("lmcore_op_impls", "ok", "it offers none")]


def test_an_older_contract_decides_the_call():
    """Held against a version in which the op had another argument, the kernel does not fit."""
    old = copy.deepcopy(CONTRACT) | {"api": "0.9"}
    old["ops"]["rms_norm"]["parameters"].pop()
    (line,) = checked(kernel(), contract=old)
    assert "it needs `epsilon`, which the op does not pass" in line[2]
    del old["ops"]["rms_norm"]
    (line,) = checked(kernel(), contract=old)
    assert "version 0.9 of the contract has no op `rms_norm`" in line[2]


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_the_snapshot_has_the_signature_of_the_reference(spec):
    """Kernels are compared with the reference itself, annotations aside."""
    known = inspect.signature(reference_of(CONTRACT["ops"][spec.name])).parameters.values()
    real = inspect.signature(load_target(spec.reference)).parameters.values()
    assert [(parameter.name, parameter.kind, parameter.default) for parameter in known] == [
        (parameter.name, parameter.kind, parameter.default) for parameter in real
    ]


def test_every_attribute_is_queried():
    """The cases know every attribute that an op can have, and give each a second value or one."""
    names = [option.name for option in options_of(OpAttributes)]
    cases = list(contexts("chip", names))
    assert {name for case in cases for name in case.attributes} == set(names)
    assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16", "float64"}
    for name in ("causal", "masked", "bias", "compile"):
        assert {case.attributes.get(name) for case in cases} == {True, False, None}
