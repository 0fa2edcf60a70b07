"""Plugins without a device are tried: alone, beside a device, and as a run would bind them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.base.errors import ConfigError
from lmcore_conformance.contributions import NOTHING, touched
from lmcore_conformance.declaration import declaration_of
from lmcore_conformance.registry import all_checks
from lmcore_conformance.report import make_report, render
from lmcore_conformance.result import Result, Status
from lmcore_conformance.runner import Runner
from lmcore_conformance.target import Target, find_plugin_targets, find_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture
def extra(extra_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs the five plugins, right or wrong, beside the CPU's."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lmcore_extra"]:
            del sys.modules[name]

    def install(*, wrong: bool = False, allowed: str = "") -> None:
        monkeypatch.syspath_prepend(extra_site)
        monkeypatch.setenv("EXTRA_WRONG", "1" if wrong else "")
        monkeypatch.setenv("LMCORE_PLUGINS", allowed)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        forget()

    yield install
    forget()


def made(target: Target, *ids: str) -> tuple[Runner, list[Result]]:
    """Return the results of checks."""
    checks = all_checks()
    runner = Runner(target, declaration_of(target, checks), checks)
    runner.choose(ids)
    return runner, [runner.result(name) for name in ids]


CASES = [
    ("onlyops", "ops.bias_gelu.forward", "`six of onlyops`: regular, float32: the output has"),
    (
        "countgloo",
        "distributed.all-reduce",
        "sum of torch.float32: 1,001 of 1,001 numbers are wrong",
    ),
    ("purebf16", "train.precision-in-force", "`purebf16`: precision `purebf16` is not applied"),
    ("torchckpt", "train.recompute-own", "recompute `torchckpt` is not exact on device `cpu`"),
    ("slowstager", "device.stagers", "`slowstager`: it declares `copies`, and returned `weight`"),
]


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(False, marks=pytest.mark.full, id="right"), pytest.param(True, id="wrong")],
)
@pytest.mark.parametrize("name, check, message", CASES)
def test_alone(extra: Any, name: str, check: str, message: str, *, wrong: bool) -> None:
    """`--plugin NAME` passes the right plugin, and catches the wrong one by the check about it."""
    extra(wrong=wrong)
    (target,) = find_plugin_targets(name)
    assert (target.name, target.device_type, target.alone) == (name, "cpu", True)
    runner, (result,) = made(target, check)
    assert check in runner.touched
    assert result.status == ("failed" if wrong else "passed"), result
    assert (message in "\n".join((result.detail, *result.findings))) is wrong


def test_what_a_run_binds_is_tried(extra: Any) -> None:
    """An installed kernel that goes before the CPU's is tried with it, unless it is left out."""
    extra(wrong=True, allowed="onlyops")
    target = find_target("cpu")
    assert [one.name for one in target.others] == ["onlyops"]
    assert [one.name for one in target.under_test] == ["cpu"]
    _, (result,) = made(target, "ops.bias_gelu.forward")
    assert result.status == "failed"
    assert [line.partition(":")[0] for line in result.findings] == [
        "`six of onlyops`",
        "`last of onlyops`",
    ]
    extra(wrong=True)
    assert find_target("cpu").others == ()
    extra(wrong=True, allowed="onlyops,slowstager")
    assert find_target("cpu", companions=[]).others == ()


def test_beside_a_device(extra: Any) -> None:
    """`--with` takes the named plugins, whose contract is checked; the backend is bound."""
    extra()
    target = find_target("cpu", companions=["countgloo", "onlyops"])
    assert [one.name for one in target.others] == ["countgloo", "onlyops"]
    assert [one.name for one in target.under_test] == ["cpu", "countgloo", "onlyops"]
    runner, results = made(target, "contract.idempotent", "distributed.broadcast")
    assert {result.status for result in results} == {"passed"}, results
    assert results[0].detail.count("plugin `onlyops`: the same a second time: info") == 1
    report = make_report(
        target,
        runner.declaration,
        all_checks(),
        runner.results,
        contributions=runner.contributions,
    )
    text = "\n".join(render(report))
    assert "  countgloo (lmcore-extra 0.3)\n    comm backends: countgloo\n" in text
    assert "swiglu=lost of onlyops: not tried: needs `lmcore_nowhere`, not installed" in text
    assert "bias_gelu=wide of onlyops: not tried: is for a million channels" in text
    assert report.badge.startswith("lmcore conformance 1.2: cpu ")
    assert " with countgloo 0.3, onlyops 0.3: " in report.badge
    cpu, _, onlyops = report.to_dict()["plugins"]
    assert (cpu["name"], cpu["distribution"], cpu["brings"]["device"]) == ("cpu", "lmcore", "cpu")
    six = onlyops["brings"]["kernels"][0]
    assert (six["op"], six["id"], six["tried"], six["bound"] > 10) == (
        "bias_gelu",
        "six",
        False,
        True,
    )
    assert "bias_gelu=six" not in text  # L2 was not made


def test_levels_that_touch_nothing_of_it(extra: Any) -> None:
    """They are not applicable, and no check of them is made; the report has the rest."""
    extra()
    (target,) = find_plugin_targets("onlyops")
    runner, results = made(target, "ops.bias_gelu.forward", "train.curve", "train.repeat")
    assert [result.status for result in results] == ["passed", "passed", "not applicable"]
    assert results[2].detail == "its runs use nothing of plugin `onlyops`"  # not deterministic
    report = make_report(
        target,
        runner.declaration,
        all_checks(),
        runner.results,
        contributions=runner.contributions,
        touched=runner.touched,
    )
    levels = {level.level: level for level in report.levels}
    assert levels["L4"].verdict == "not applicable"
    assert (levels["L4"].checks, levels["L2"].passed) == (0, 1)
    text = "\n".join(render(report))
    assert "    kernels: bias_gelu=six, bias_gelu=last\n" in text
    assert "bias_gelu=last of onlyops: never bound: `six` has priority 99, this -1" in text
    assert "bias_gelu=torch" not in text  # of the CPU's plugin, whose kernels are not tried
    assert "lmcore conformance 1.2: onlyops 0.3 on cpu: " in report.badge


def test_a_device_that_cannot_be_created_is_not_left_out(extra: Any) -> None:
    """A device that could not be examined stays in the session, which fails."""
    extra()
    (target,) = find_plugin_targets("onlyops")
    runner = Runner(target, declaration_of(target, all_checks()), all_checks())
    runner.results["device.create"] = Result("device.create", Status.FAILED, "no driver")
    assert runner.offers_something
    runner.results["device.create"] = Result("device.create", Status.PASSED)
    assert not runner.offers_something


def test_each_kind_touches_checks_that_exist() -> None:
    """Every pattern of checks matches one, and a plugin without offers keeps the contract alone."""
    from lmcore_conformance.contributions import _ALWAYS, _OF_A_DEVICE, _TOUCHED

    ids = [check.id for check in all_checks()]
    for pattern in (*_ALWAYS, *_OF_A_DEVICE, *(one for kind in _TOUCHED.values() for one in kind)):
        assert any(Path(name).match(pattern) for name in ids), pattern
    alone = touched(NOTHING, ids)
    assert {name.partition(".")[0] for name in alone} == {"contract", "device"}
    assert not set(_OF_A_DEVICE) & set(alone)


@pytest.mark.parametrize(
    "find, message",
    [
        (lambda: find_target("onlyops"), "`--plugin onlyops` tests what it offers to devices"),
        (lambda: find_target("cpu", companions=["cpu"]), "`--with cpu`: plugin `cpu`"),
        (lambda: find_target("cpu", companions=["onlyop"]), "did you mean `onlyops`?"),
        (lambda: find_plugin_targets("cpu"), "`--accelerator cpu` tests it"),
        (lambda: find_plugin_targets("onlyop"), "did you mean `onlyops`?"),
    ],
)
def test_wrong_names(extra: Any, find: Callable[[], Any], message: str) -> None:
    """A plugin of the other kind, or none, is an error with the right option or name."""
    extra()
    with pytest.raises(ConfigError) as error:
        find()
    assert message in error.value.render()
