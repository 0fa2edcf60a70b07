"""Records that are not what the contract says, in their fields or in what they answer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmcore.contract import (
    Check,
    CheckStatus,
    CommBackend,
    Device,
    PluginInfo,
    PrecisionPolicy,
    Probe,
    ProbeState,
    RecomputePolicy,
)
from lmcore_conformance.contract.snapshot import describe_contract
from lmcore_conformance.plugin_check import records
from lmcore_conformance.plugin_check.records import (
    check_backends,
    check_device,
    check_precisions,
    check_recompute,
    field_problems,
)

CONTRACT = describe_contract()


def nothing(*_values: Any) -> None: ...


def device(**fields):
    values = {
        "type": "chip",
        "index": 0,
        "name": "Chip 1",
        "dtypes": frozenset({"float32"}),
        "missing": dict.fromkeys(optional_abilities(), "not on this chip"),
        **dict.fromkeys(
            ("synchronize", "set_current", "seed", "get_rng_state", "set_rng_state"), nothing
        ),
    } | fields
    values["missing"] = {
        name: why for name, why in values["missing"].items() if values.get(name) is None
    }
    return Device(**values)


def optional_abilities():
    return [
        field.name
        for field in dataclasses.fields(Device)
        if str(field.type).startswith("Callable") and field.default is None
    ]


def details(checks, status="failed"):
    return [check.detail for check in checks if check.status == status]


@pytest.mark.parametrize(
    "record, message",
    [
        (Probe(3, ProbeState.PRESENT), "`Probe.device_type` is 3, and `str` is wanted"),
        (Probe("x", ProbeState.PRESENT, True), "`Probe.count` is True, and `int` is wanted"),
        (Probe("x", ProbeState.PRESENT, fix=7), "`Probe.fix` is 7, and `str | None` is wanted"),
        (Probe("x", ProbeState.PRESENT, facts=[]), "and `Mapping[str, Any]` is wanted"),
        (PluginInfo("x", ">=1", provides="cpu"), "and `tuple[str, ...]` is wanted"),
        (CommBackend("x", "y", available="yes"), "and `Callable[[], str | None]` is wanted"),
        (CommBackend("x", "y", supports_average=1), "`CommBackend.supports_average` is 1"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(record, message):
    """The value and the annotation are shown."""
    (found,) = field_problems(record, CONTRACT)
    assert message in found


def test_right_records_have_no_problem():
    """Values that fit their annotations pass, None where it may be."""
    assert list(field_problems(Check("a", CheckStatus.OK, "b"), CONTRACT)) == []
    assert list(field_problems(Probe("x", ProbeState.ABSENT, evidence=["a"]), CONTRACT)) == []
    assert list(field_problems(device(), CONTRACT)) == []


def test_a_field_that_came_later_counts_where_it_is_given():
    """Held against an older version, a field it did not have is a finding unless it is default."""
    old = copy.deepcopy(CONTRACT) | {"api": "0.9"}
    fields = old["types"]["Probe"]["fields"]
    fields[:] = [field for field in fields if field["name"] not in {"fix", "facts"}]
    assert list(field_problems(Probe("x", ProbeState.ABSENT), old)) == []
    (found,) = field_problems(Probe("x", ProbeState.ABSENT, fix="screw"), old)
    assert "`Probe.fix` is given, and version 0.9 of the contract does not have it" in found
    del old["types"]["Probe"]
    assert list(field_problems(Probe("x", ProbeState.ABSENT), old)) == [
        "version 0.9 of the contract has no `Probe`"
    ]


def test_a_field_that_an_earlier_version_of_the_range_lacks():
    """The version is named; a field with its default is no finding."""
    old = copy.deepcopy(CONTRACT) | {"api": "0.9"}
    fields = old["types"]["Probe"]["fields"]
    fields[:] = [field for field in fields if field["name"] != "fix"]
    contract = CONTRACT | {"earlier": [old]}
    assert list(field_problems(Probe("x", ProbeState.ABSENT), contract)) == []
    (found,) = field_problems(Probe("x", ProbeState.ABSENT, fix="screw"), contract)
    assert found == (
        "`Probe.fix` is given, and version 0.9 of the contract, which `PluginInfo.api` includes, "
        "does not have it"
    )


def test_a_device_that_works_is_a_line():
    """Type, index and name are shown."""
    (check,) = check_device(device(), CONTRACT)
    assert (check.status, check.detail) == ("ok", "`chip` 0: Chip 1")


@pytest.mark.parametrize(
    "dtypes, shown",
    [
        (
            {"bf16", "float32"},
            "'bf16'{NO}; did you mean `bfloat16`?",
        ),
        (
            {"torch.float32"},
            "'torch.float32'{NO}; did you mean `float32`?",
        ),
        (
            {"bfloat61"},
            "'bfloat61'{NO}; did you mean `bfloat16`?",
        ),
        (
            {torch.float16},
            "torch.float16{NO}; did you mean `float16`?",
        ),
        ({"int7.5"}, "'int7.5'{NO}"),
    ],
)
def test_a_dtype_that_torch_calls_otherwise_is_named(dtypes, shown):
    """Such a name is never found among the device's dtypes, so that it seems to lack the dtype."""
    checks = list(check_device(device(dtypes=frozenset(dtypes)), CONTRACT))
    words = shown.replace("{NO}", ", which is no name of a dtype of torch's")
    assert details(checks) == [f"`Device.dtypes` has {words}"]


def broken(*_values: Any) -> Any:
    raise OSError("no power")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dtypes": ["fp32"]}, "`Device.dtypes` is ['fp32'], and `frozenset[str]` is wanted"),
        ({"synchronize": broken}, "`synchronize` raised OSError: no power"),
        ({"set_current": broken}, "`set_current` raised OSError: no power"),
        ({"get_rng_state": broken}, "`set_rng_state` raised OSError: no power"),
        ({"memory_stats": broken}, "`memory_stats` raised OSError: no power"),
        ({"memory_stats": lambda: 3}, "`memory_stats` returned 3, no `MemoryStats`"),
        ({"index": "0"}, "`Device.index` is '0', and `int` is wanted"),
        ({"seed": None}, "`Device.seed` is None, and `Callable[[int], None]` is wanted"),
    ],
)
def test_a_device_that_does_not_work_is_reported(fields, message):
    """Its record and its plain functions are tried."""
    checks = list(check_device(device(**fields), CONTRACT))
    assert details(checks) == [message]
    assert len(checks) == 1


def backend(name="wire", device_type="chip", **fields):
    return CommBackend(name, device_type, **fields)


@pytest.mark.parametrize(
    "backends, message",
    [
        ([backend(), backend()], "it offers `wire` 2 times"),
        ([backend(device_type="moon")], "`wire` is for `moon`"),
        ([backend(available=lambda: True)], "`available` returned True"),
        ([backend(available=lambda: "")], "`available` returned ''"),
        ([backend(available=broken)], "`available` raised OSError: no power"),
        ([backend(name=3)], "`CommBackend.name` is 3"),
    ],
)
def test_a_wrong_backend_is_reported(backends, message):
    """Names, device types and answers are checked."""
    (found,) = details(check_backends(backends, device(), CONTRACT))
    assert message in found


def test_backends_that_are_right_are_listed():
    """A backend that cannot be used here is listed with its reason."""
    backends = [backend(), backend("radio", available=lambda: "no aerial")]
    (check,) = check_backends(backends, device(), CONTRACT)
    assert (check.status, check.detail) == ("ok", "`wire`, `radio` (not here: no aerial)")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Stand-in for a precision policy, with its answers alone."""

    name: str
    priority: int = 0
    compute: str = "float32"
    verify: Callable[[Device], None] = nothing
    available: Callable[[], str | None] = lambda: None


@pytest.fixture
def _stand_ins(monkeypatch):
    monkeypatch.setattr(records, "field_problems", lambda record, contract: [])


@pytest.mark.usefixtures("_stand_ins")
def test_a_precision_that_is_not_in_force_is_reported():
    """Each one that the device can run is verified; the others are not."""
    policies = [
        Policy("fp32", 3),
        Policy("bf16", 2, compute="bfloat16", verify=broken),
        Policy("tf32", 1, verify=broken),
    ]
    assert details(check_precisions(policies, device(), CONTRACT)) == [
        "`tf32` raised OSError: no power"
    ]


@pytest.mark.usefixtures("_stand_ins")
def test_two_default_precisions_are_reported():
    """Two defaults are an error, because the choice would be arbitrary."""
    policies = [Policy("a", 5), Policy("b", 5), Policy("c", 5, available=lambda: "no"), Policy("d")]
    (found,) = details(check_precisions(policies, device(), CONTRACT))
    assert found == "`a` and `b` both have the highest priority, 5: neither is the default"


@pytest.mark.usefixtures("_stand_ins")
def test_precisions_that_are_right_are_listed():
    """Also where only one can be used."""
    policies = [Policy("fp32"), Policy("fp8", available=lambda: "no such units")]
    (check,) = check_precisions(policies, device(), CONTRACT)
    assert (check.status, check.detail) == ("ok", "`fp32`, `fp8` (not here: no such units)")


def test_a_real_precision_policy_has_no_problem():
    """The record that the core's own function makes fits the contract."""
    from lmcore.contract import full_precision_policy

    policy = full_precision_policy()
    assert isinstance(policy, PrecisionPolicy)
    assert list(field_problems(policy, CONTRACT)) == []


@pytest.mark.parametrize("brings_device", [True, False])
def test_a_device_needs_the_policy_none(brings_device):
    """An extension may add to a device's policies without it."""
    policies = [RecomputePolicy("full", "keeps little")]
    found = details(check_recompute(policies, CONTRACT, brings_device=brings_device))
    assert found == (
        ["`none` is missing, which every run without `--recompute` asks for"]
        if brings_device
        else []
    )
