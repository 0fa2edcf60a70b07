"""Attributes of a case, on which ops, model, command and documentation agree."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from lmcore.contract import OP_SPECS, OpAttributes
from lmcore.contract.op.context import attribute_options, op_context
from lmcore.contract.op.records import load_target

SPECS = {spec.name: spec for spec in OP_SPECS}
NAMES = [field.name for field in dataclasses.fields(OpAttributes)]


def test_every_attribute_is_declared_and_every_declared_one_is_an_ops():
    """There is one table, without what no op has."""
    used = {name for spec in OP_SPECS for name in spec.attributes}
    assert used == set(NAMES) == set(attribute_options())


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_what_gets_gradients_is_an_argument(spec):
    """Gradients flow to parameters of the reference, in their order, and the schema has each."""
    parameters = list(inspect.signature(load_target(spec.reference)).parameters)
    assert [name for name in parameters if name in spec.gradients] == list(spec.gradients)
    assert all(name in spec.schema for name in spec.gradients)


def test_a_case_has_what_the_op_declares_and_what_has_a_value():
    """Other attributes, and attributes that are None, are left out."""
    everything = dict.fromkeys(NAMES, 8) | {"head_dim": None, "causal": False}
    case = op_context(SPECS["attention"], "cpu", "float32", everything)
    assert (case.device_type, case.dtype) == ("cpu", "float32")
    assert set(case.attributes) == set(SPECS["attention"].attributes) - {"head_dim"}
    assert case.attributes["causal"] is False
    assert op_context(SPECS["grad_norm"], "cpu", "float32", everything).attributes == {}


def test_attributes_without_a_usual_value_have_none():
    """Sizes are left open; a switch has the value of most cases."""
    defaults = dataclasses.asdict(OpAttributes())
    assert {name for name, value in defaults.items() if value is not None} == {
        "causal", "masked", "dropout", "bias", "compile"
    }  # fmt: skip
