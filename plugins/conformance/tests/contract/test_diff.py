"""Every kind of change of the plugin contract, planted into a snapshot of the real one."""

from __future__ import annotations

import copy

import pytest
from packaging.version import Version

from lmcore_conformance.contract.diff import ChangeKind, compare, needed_version, version_problem
from lmcore_conformance.contract.snapshot import describe_contract

CURRENT = describe_contract() | {"api": "3.4"}


def field(name, annotation="int", *, default=False):
    return {"name": name, "type": annotation, "default": default}


def parameter(name, default=None, kind="positional_or_keyword", annotation="int"):
    return {"name": name, "type": annotation, "kind": kind, "default": default}


def entry(described, name):
    (found,) = [entry for entry in described if entry["name"] == name]
    return found


def rename(mapping, old, new):
    mapping[new] = mapping.pop(old)


def hooks(contract):
    return contract["hooks"]


def probe_fields(contract):
    return contract["types"]["Probe"]["fields"]


def policy(contract):
    return contract["functions"]["autocast_policy"]["parameters"]


def method(contract, owner, name):
    return contract["types"][owner]["methods"][name]


BREAKING = {
    "hook removed": (
        lambda new: hooks(new).pop("lmcore_doctor"),
        ["hook `lmcore_doctor` is gone"],
    ),
    "hook argument removed": (
        lambda new: hooks(new)["lmcore_probe"]["arguments"].pop("env"),
        ["hook `lmcore_probe`: argument `env` is gone"],
    ),
    "hook argument's type": (
        lambda new: hooks(new)["lmcore_probe"]["arguments"].update(env="str"),
        ["hook `lmcore_probe`: type of `env` was `Mapping[str, str]`, is `str`"],
    ),
    "hook's result": (
        lambda new: hooks(new)["lmcore_probe"].update(result="Probe | None"),
        ["hook `lmcore_probe`: result was `Probe`, is `Probe | None`"],
    ),
    "type removed": (
        lambda new: new["types"].pop("Reject"),
        ["type `Reject` is gone"],
    ),
    "type's kind": (
        lambda new: new["types"]["Reject"].update(kind="class"),
        ["type `Reject`: it was record, it is class"],
    ),
    "field removed": (
        lambda new: probe_fields(new).pop(),
        ["type `Probe`: field `facts` is gone"],
    ),
    "field's type": (
        lambda new: entry(probe_fields(new), "count").update(type="str"),
        ["type `Probe`: type of `count` was `int`, is `str`"],
    ),
    "field added without a default": (
        lambda new: probe_fields(new).append(field("age")),
        ["type `Probe`: field `age` is new, without a default"],
    ),
    "field's default removed": (
        lambda new: entry(probe_fields(new), "count").update(default=False),
        ["type `Probe`: field `count` has no default any more"],
    ),
    "enum value removed": (
        lambda new: new["types"]["ProbeState"]["values"].pop("BROKEN"),
        ["type `ProbeState`: `BROKEN` is gone"],
    ),
    "enum value changed": (
        lambda new: new["types"]["ProbeState"]["values"].update(BROKEN="bad"),
        ["type `ProbeState`: value of `BROKEN` was `broken`, is `bad`"],
    ),
    "method removed": (
        lambda new: new["types"]["Device"]["methods"].pop("require"),
        ["type `Device`: method `require` is gone"],
    ),
    "method becomes a property": (
        lambda new: method(new, "Device", "describe").update(kind="property"),
        ["type `Device`: method `describe`: kind was `method`, is `property`"],
    ),
    "method's parameter added": (
        lambda new: method(new, "Device", "require")["parameters"].append(parameter("why")),
        ["type `Device`: method `require`: parameter `why` is new, without a default"],
    ),
    "method to be written": (
        lambda new: method(new, "Tokenizer", "files").update(abstract=True),
        ["type `Tokenizer`: method `files` has to be written now"],
    ),
    "new method to be written": (
        lambda new: new["types"]["Tokenizer"]["methods"].update(
            weigh=method(new, "Tokenizer", "encode")
        ),
        ["type `Tokenizer`: method `weigh` is new, to be written"],
    ),
    "written method gets an argument": (
        lambda new: method(new, "Tokenizer", "encode")["parameters"].append(parameter("to", "1")),
        ["type `Tokenizer`: method `encode`: parameter `to` is new"],
    ),
    "function removed": (
        lambda new: new["functions"].pop("autocast_policy"),
        ["function `autocast_policy` is gone"],
    ),
    "function's parameter removed": (
        lambda new: policy(new).pop(),
        ["function `autocast_policy`: parameter `priority` is gone"],
    ),
    "function's parameter by name only": (
        lambda new: policy(new)[0].update(kind="keyword_only"),
        [
            "function `autocast_policy`: parameter `device`: kind was `positional_or_keyword`",
        ],
    ),
    "function's default removed": (
        lambda new: entry(policy(new), "priority").update(default=None),
        ["function `autocast_policy`: parameter `priority` has no default any more"],
    ),
    "function's result": (
        lambda new: new["functions"]["none_policy"].update(result="None"),
        ["function `none_policy`: result was `RecomputePolicy`, is `None`"],
    ),
    "op removed": (
        lambda new: new["ops"].pop("swiglu"),
        ["op `swiglu` is gone"],
    ),
    "op's default": (
        lambda new: entry(new["ops"]["attention"]["parameters"], "dropout").update(default="0.1"),
        ["op `attention`: its call was "],
    ),
    "op's parameter added": (
        lambda new: new["ops"]["attention"]["parameters"].append(parameter("sink", "None")),
        ["op `attention`: its call was "],
    ),
    "op's parameter by name": (
        lambda new: new["ops"]["rms_norm"]["parameters"][-1].update(kind="keyword_only"),
        ["op `rms_norm`: types or kinds of its parameters changed"],
    ),
    "op's schema": (
        lambda new: new["ops"]["grad_norm"].update(schema="(grads) -> norms"),
        ["op `grad_norm`: its call was (grads) with the schema `(grads) -> norm (float32 scalar)`"],
    ),
    "op's gradient added": (
        lambda new: new["ops"]["grad_norm"]["gradients"].append("grads"),
        ["op `grad_norm`: gradients have to flow to `grads` now"],
    ),
    "op's attribute removed": (
        lambda new: new["ops"]["attention"]["attributes"].remove("causal"),
        ["op `attention`: attribute `causal` is gone"],
    ),
    "name removed": (
        lambda new: new["names"].remove("OP_SPECS"),
        ["name `OP_SPECS` is gone"],
    ),
    "torch's function needed": (
        lambda new: new["torch"].update(
            {"Stream.record": {**new["torch"]["Stream.wait_event"], "abilities": ["new_stream"]}}
        ),
        ["torch's `Stream.record` is needed by devices with `new_stream`"],
    ),
    "torch's function needed by more devices": (
        lambda new: new["torch"]["Stream.wait_event"].update(abilities=[]),
        ["torch's `Stream.wait_event` was needed by devices with `new_stream` and `new_event`"],
    ),
    "torch's function without replacement": (
        lambda new: new["torch"]["module.synchronize"].update(instead=""),
        ["torch's `module.synchronize` is not replaced by `torch.accelerator.synchronize` any"],
    ),
    "public name removed": (
        lambda new: new["modules"]["lmcore.base.errors"].remove("DeviceError"),
        ["module `lmcore.base.errors`: name `DeviceError` is gone"],
    ),
    "public module removed": (
        lambda new: new["modules"].pop("lmcore.hookspecs"),
        ["module `lmcore.hookspecs` is gone"],
    ),
}
"""Changes by name: the function that makes one, and the beginnings of the findings."""

SEVERAL = {
    "hook renamed": (
        lambda new: rename(hooks(new), "lmcore_doctor", "lmcore_nurse"),
        ["hook `lmcore_doctor` is gone", "hook `lmcore_nurse` is new"],
    ),
    "hook argument renamed": (
        lambda new: rename(hooks(new)["lmcore_probe"]["arguments"], "env", "environment"),
        [
            "hook `lmcore_probe`: argument `env` is gone",
            "hook `lmcore_probe`: argument `environment` is new",
        ],
    ),
    "field renamed": (
        lambda new: entry(probe_fields(new), "count").update(name="number"),
        [
            "type `Probe`: field `count` is gone",
            "type `Probe`: field `number` is new",
            "type `Probe`: fields have another order: device_type, state, number,",
        ],
    ),
    "function's parameter in front": (
        lambda new: policy(new).insert(0, parameter("age", "1")),
        [
            "function `autocast_policy`: parameter `age` is new",
            "function `autocast_policy`: parameters have another order: age, device",
        ],
    ),
    "field in front": (
        lambda new: probe_fields(new).insert(0, field("age", default=True)),
        [
            "type `Probe`: field `age` is new",
            "type `Probe`: fields have another order: age, device_type",
        ],
    ),
}

COMPATIBLE = {
    "hook added": (
        lambda new: hooks(new).update(lmcore_sing=hooks(new)["lmcore_probe"]),
        "hook `lmcore_sing` is new",
    ),
    "hook argument added": (
        lambda new: hooks(new)["lmcore_probe"]["arguments"].update(hint="str"),
        "hook `lmcore_probe`: argument `hint` is new",
    ),
    "type added": (
        lambda new: new["types"].update(Song=new["types"]["Reject"]),
        "type `Song` is new",
    ),
    "field added with a default": (
        lambda new: probe_fields(new).append(field("age", default=True)),
        "type `Probe`: field `age` is new",
    ),
    "field gets a default": (
        lambda new: entry(probe_fields(new), "state").update(default=True),
        "type `Probe`: field `state` has a default",
    ),
    "enum value added": (
        lambda new: new["types"]["ProbeState"]["values"].update(ASLEEP="asleep"),
        "type `ProbeState`: `ASLEEP` is new",
    ),
    "method added": (
        lambda new: new["types"]["Device"]["methods"].update(ask=method(new, "Device", "require")),
        "type `Device`: method `ask` is new",
    ),
    "function added": (
        lambda new: new["functions"].update(half_policy=new["functions"]["none_policy"]),
        "function `half_policy` is new",
    ),
    "function's parameter added": (
        lambda new: policy(new).append(parameter("age", "1")),
        "function `autocast_policy`: parameter `age` is new",
    ),
    "function's default": (
        lambda new: entry(policy(new), "priority").update(default="7"),
        "function `autocast_policy`: parameter `priority`: its default is 7",
    ),
    "name added": (
        lambda new: new["names"].append("SONGS"),
        "name `SONGS` is new",
    ),
    "torch's function not needed": (
        lambda new: new["torch"].pop("Stream.wait_event"),
        "torch's `Stream.wait_event` is not needed any more",
    ),
    "torch's function optional": (
        lambda new: new["torch"]["Tensor.pin_memory"].update(optional=True),
        "torch's `Tensor.pin_memory` was needed by devices with `pin_memory`, is optional",
    ),
    "public name added": (
        lambda new: new["modules"]["lmcore.base.errors"].append("SongError"),
        "module `lmcore.base.errors`: name `SongError` is new",
    ),
    "op's attribute added": (
        lambda new: new["ops"]["attention"]["attributes"].append("age"),
        "op `attention`: attribute `age` is new",
    ),
    "op's gradient removed": (
        lambda new: new["ops"]["swiglu"]["gradients"].clear(),
        "op `swiglu`: gradients need not flow to `x_BS2F` any more",
    ),
    "op added": (
        lambda new: new["ops"].update(relu=new["ops"]["swiglu"]),
        "op `relu` is new",
    ),
}

WORDING = {
    "hook's text": lambda new: hooks(new)["lmcore_probe"].update(when="sometimes."),
    "op's summary": lambda new: new["ops"]["swiglu"].update(summary="Twice."),
}


def changed(change):
    new = copy.deepcopy(CURRENT)
    change(new)
    assert new != CURRENT
    return new


def test_a_contract_does_not_differ_from_itself():
    """An unchanged contract has no findings, and the version may stay."""
    assert compare(CURRENT, copy.deepcopy(CURRENT)) == []
    assert needed_version(CURRENT, []) == Version("3.4")
    assert version_problem(CURRENT, CURRENT) is None


@pytest.mark.parametrize("edit", [*BREAKING, *SEVERAL])
def test_what_breaks_plugins_needs_the_next_first_number(edit):
    """A removal, a change, or a demand on the plugin is found, named, and needs 4.0."""
    change, texts = (BREAKING | SEVERAL)[edit]
    new = changed(change)
    found = compare(CURRENT, new)
    assert len(found) == len(texts), found
    for one, text in zip(found, texts, strict=True):
        assert one.text.startswith(text)
    for version in ("3.4", "3.5", "3.99"):
        problem = version_problem(CURRENT, new | {"api": version})
        assert problem is not None
        assert "\n  breaking: " in problem
        assert all(f": {text}" in problem for text in texts)
        assert problem.endswith("to 4.0")
    assert version_problem(CURRENT, new | {"api": "4.0"}) is None


@pytest.mark.parametrize("edit", COMPATIBLE)
def test_what_is_added_needs_the_next_second_number(edit):
    """An addition that plugins can ignore is found, named, and needs 3.5."""
    change, text = COMPATIBLE[edit]
    new = changed(change)
    (found,) = compare(CURRENT, new)
    assert (found.kind, found.text) == (ChangeKind.COMPATIBLE, text)
    problem = version_problem(CURRENT, new)
    assert problem is not None
    assert problem.endswith("to 3.5")
    for version in ("3.5", "3.10", "4.0"):
        assert version_problem(CURRENT, new | {"api": version}) is None


@pytest.mark.parametrize("edit", COMPATIBLE)
def test_the_opposite_of_an_addition_breaks(edit):
    """A compatible addition may not be taken back, except a default's value."""
    new = changed(COMPATIBLE[edit][0])
    (found,) = compare(new, CURRENT)
    wanted = ChangeKind.COMPATIBLE if edit == "function's default" else ChangeKind.BREAKING
    assert found.kind is wanted


@pytest.mark.parametrize("edit", WORDING)
def test_another_wording_needs_no_other_version(edit):
    """An improved text is found, and the version may stay."""
    new = changed(WORDING[edit])
    (found,) = compare(CURRENT, new)
    assert found.kind is ChangeKind.WORDING
    assert version_problem(CURRENT, new) is None
