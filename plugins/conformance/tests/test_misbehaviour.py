"""Findings of a misbehaving device, each at its level."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.plugin import PluginRecord, PluginSet, PluginState
from lmcore_conformance.declaration import Declaration
from lmcore_conformance.pytest_plugin import _failure_text
from lmcore_conformance.registry import all_checks
from lmcore_conformance.report import make_report, render
from lmcore_conformance.result import Result, Status
from lmcore_conformance.runner import Runner, _joined
from lmcore_conformance.target import Target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def failing(results: Any) -> set[str]:
    return {name for name, result in results.items() if result.status == "failed"}


@pytest.mark.parametrize(
    "mode, names, broken, message",
    [
        ("slow-import", "contract.import-time", {"contract.import-time"}, " s"),
        (
            "opens",
            "contract.probe-initialises-nothing contract.probe",
            {"contract.probe-initialises-nothing"},
            "`/dev/zero` stays open",
        ),
        ("not-twice", "contract.idempotent", {"contract.idempotent"}, "info differs"),
        (
            "crash-probe",
            "contract.probe contract.import",
            {"contract.probe"},
            "was killed by SIGABRT",
        ),
        (
            "forgets-rng",
            "device.rng-state device.seed",
            {"device.rng-state"},
            "the restored state is not the one that is read",
        ),
        (
            "live-state",
            "device.rng-state device.seed",
            {"device.rng-state"},
            "changes while numbers are drawn",
        ),
        (
            "read-moves-draws",
            "device.rng-state device.seed",
            {"device.rng-state"},
            "reading the state changes the numbers of later steps",
        ),
        ("seed-of-16-bits", "device.seed", {"device.seed"}, "2**16 and 2**24"),
        (
            "reduce-in-float",
            "distributed.all-reduce",
            {"distributed.all-reduce"},
            "sum of torch.int64 above 2**60",
        ),
        ("ignores-seed", "device.seed", {"device.seed"}, "one seed gives two sequences"),
        (
            "never-falls",
            "device.memory-rises-and-falls",
            {"device.memory-rises-and-falls"},
            "stay in use when the tensor is gone",
        ),
        ("stale-peak", "device.memory-peak", {"device.memory-peak"}, "after the reset"),
        (
            "no-bfloat16",
            "device.dtype.bfloat16 device.dtype.float32",
            {"device.dtype.bfloat16"},
            "NotImplementedError: no bfloat16 here",
        ),
        (
            "kills-large",
            "device.memory-consistent device.out-of-memory",
            {"device.out-of-memory"},
            "was killed by SIGABRT",
        ),
        (
            "no-memory",
            "device.memory-consistent",
            {"device.memory-consistent"},
            "undeclared gap: the device does not offer bytes in use, by `memory_stats` (not yet",
        ),
        (
            "no-double",
            "device.dtype.float64",
            {"device.dtype.float64"},
            "undeclared gap: the device does not offer matrix products in float64",
        ),
        (
            "offers-closed",
            "device.declaration",
            {"device.declaration"},
            "`float16` is closed, and the device offers matrix products in float16",
        ),
        (
            "divides-by-the-world",
            "device.declaration",
            {"device.declaration"},
            "`average` is closed, and the device offers collectives that average, by `CommBackend.",
        ),
        ("stager", "device.stagers", {"device.stagers"}, "`stale`: `weight` has other numbers"),
        ("shared", "device.stagers", {"device.stagers"}, "`shared`: `weight` has other numbers"),
        ("late", "device.stagers", {"device.stagers"}, "`late`: `weight` has other numbers"),
        (
            "false-bf16",
            "train.precision-in-force",
            {"train.precision-in-force"},
            "`bf16`: precision `bf16` is not applied",
        ),
        (
            "prepares-nothing",
            "train.precision-in-force train.attention-precision",
            {"train.precision-in-force"},
            "`prepare` of precision `bf16` changes nothing in a GPT",
        ),
        (
            "bf16-weights",
            "train.precision-in-force train.attention-precision",
            {"train.attention-precision"},
            "`bf16` promises products in bfloat16, and attention is computed in float32: bmm",
        ),
        (
            "seeds-python",
            "device.seed device.seed-alone",
            {"device.seed-alone"},
            "`Device.seed` changes the state of Python's `random`",
        ),
        (
            "seeds-numpy",
            "device.seed device.seed-alone",
            {"device.seed-alone"},
            "`Device.seed` changes the state of `numpy.random`",
        ),
        (
            "kept-settings",
            "device.settings",
            {"device.settings"},
            "precision `fp32`, after its `context()` is left: it changes the flush of denormal",
        ),
        (
            "raised-settings",
            "device.settings",
            {"device.settings"},
            "`fp32`, after an exception leaves its `context()`: it changes torch's precision of",
        ),
        (
            "deterministic-recompute",
            "device.settings",
            {"device.settings"},
            "recompute `careful`: it changes torch's deterministic mode from False to True",
        ),
        (
            "threaded",
            "device.settings device.stagers",
            {"device.settings"},
            "checkpoint stager `threaded`: it changes torch's number of threads from ",
        ),
        (
            "no-generation",
            "extras.next-token-slots",
            {"extras.next-token-slots"},
            "does not offer attention of new tokens over a cache, by `next_token_attention`",
        ),
        (
            "leaking-projection",
            "extras.quantized-projection extras.projection-rows",
            {"extras.projection-rows"},
            "beside rows with NaN a row is finite where it should not be",
        ),
    ],
)
def test_each_is_caught(run: Any, mode: str, names: str, broken: set[str], message: str) -> None:
    """The check that is about it fails with the words that name it; its neighbours pass."""
    results = run(mode, *names.split())
    assert failing(results) == broken, results
    (name,) = broken
    text = "\n".join((results[name].detail, *results[name].findings))
    assert message in text
    assert all(results[result].status == "passed" for result in results.keys() - broken)


def test_effects_on_the_process(run: Any) -> None:
    """Level 0 has a check for each moment at which a plugin changes the process of the command."""
    results = run("restless", "contract.*")
    assert failing(results) == {
        *("contract.import-effects", "contract.launcher-hooks", "contract.hook-effects"),
    }, results
    assert "prints to standard output" in results["contract.import-effects"].detail
    assert "the limit is 0.5 s" in results["contract.launcher-hooks"].detail
    assert "`torch.nn.functional.dropout` is replaced" in results["contract.hook-effects"].detail


def test_a_kernel_that_does_no_case(run: Any) -> None:
    """It is a fault, with its reasons, unless its package does not fit; it is not loaded."""
    names = ("contract.offers", "ops.rms_norm.forward", "ops.reached")
    results = run("rejects-all", *names)
    assert failing(results) == {"ops.reached"}, results
    reasons = "`norms` 1.0 is for torch 1.0; is for float32"
    fault = f"`rms_norm=rejects-all` does no case in any dtype: {reasons}"
    assert fault in results["ops.reached"].findings
    results = run("unusable-package", *names)
    assert failing(results) == set(), results
    left = "not tried: rms_norm=unusable-package (`norms` 1.0 is for torch 1.0)"
    assert left in results["ops.reached"].detail


def test_a_device_that_crashes_when_it_is_created(run: Any) -> None:
    """Level 0 names the hook, level 1 reports the failed creation, the rest is not reached."""
    results = run("crash-create", "contract.*", "device.create", "ops.linear.*", "extras.profiler")
    assert failing(results) == {"contract.offers", "device.create"}
    assert "lmcore_create_device: the process was killed by" in results["contract.offers"].detail
    assert "was killed by SIGSEGV" in results["device.create"].detail
    assert results["ops.linear.forward"].status == "not run"
    assert results["ops.linear.forward"].detail == "not reached: `device.create` failed"


def test_a_wrong_collective(run: Any) -> None:
    """A sum that is wrong on one rank fails its check with the rank's name; the others pass."""
    names = ("distributed.all-reduce", "distributed.broadcast", "distributed.all-gather")
    # The other rank waits for it until the limit: three seconds, in place of twenty.
    results = run("wrong-reduce", *names, patience=0.15)
    assert failing(results) == {"distributed.all-reduce"}
    assert "rank 1: sum of torch.float32: 1 of 1,001 numbers is wrong" in (
        results["distributed.all-reduce"].findings
    )


@pytest.mark.parametrize(
    "mode, message",
    [
        ("wrong-large-max", "max of 1,048,577 numbers in torch.float32, in place: 1 of 1,048,577"),
        pytest.param(
            "wrong-large-bf16",
            "sum of 1,048,577 numbers in torch.bfloat16, in place: 1 of 1,048,577",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "wrong-view",
            "a reduction in a view changes the numbers beside it",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_collective_that_is_wrong_for_one_kind_of_large_message(
    run: Any, mode: str, message: str
) -> None:
    """Operation, dtype and layout are tried at the sizes of gradient buckets."""
    result = run(mode, "distributed.large-kinds", patience=0.3)["distributed.large-kinds"]
    assert result.status == "failed"
    assert message in result.detail


@pytest.mark.parametrize(
    "mode, fault",
    [
        (
            "raises-on-rank-1",
            "rank 1: plugin `fake` (lmcore-fake 1.0) raised in `lmcore_create_device`: RuntimeE",
        ),
        ("exits-on-rank-1", "rank 1: the process ended with status 3"),
    ],
)
def test_a_fault_of_one_rank_is_named(run: Any, mode: str, fault: str) -> None:
    """A device that fails on one rank fails the first check of level 4, with the rank."""
    name = "distributed.start"
    result = run(mode, name, patience=0.15)[name]
    assert result.status == "failed"
    assert fault in result.detail


def test_a_constant_factor_is_named(run: Any) -> None:
    """A sum that is an average says so."""
    name = "distributed.all-reduce"
    result = run("average-reduce", name)[name]
    assert "numbers are wrong; every number is 0.5 times the right one" in result.detail


def test_a_collective_whose_result_is_lost(run: Any) -> None:
    """An asynchronous reduction that does not write its result fails its check alone."""
    names = ("distributed.all-reduce", "distributed.async")
    results = run("lost-async", *names)
    assert failing(results) == {"distributed.async"}
    assert "reduction 0: " in "\n".join(results["distributed.async"].findings)


def test_further_dtypes_are_tried(run: Any) -> None:
    """A claim of float8 is one of `torch._scaled_mm`; integers are multiplied exactly."""
    found = run("no-float8", "device.dtype.others")["device.dtype.others"]
    assert found.findings == (
        "`float8_e4m3fn` is claimed; its product raised NotImplementedError: no float8 here",
    )
    found = run("float8", "device.dtype.others")["device.dtype.others"]
    assert (found.status, found.detail) == ("passed", "float8_e4m3fn, float8_e5m2, int32")


def test_an_exception_has_the_plugins_line(run: Any) -> None:
    """The finding names the plugin's line, not the check's."""
    findings = run("raises-float", "device.create")["device.create"].findings
    assert findings[0].startswith("it raised ValueError: could not convert string to float")
    assert findings[1].startswith("lmcore_fake/device.py, line ")


def test_a_missing_backend_is_said_once(run: Any) -> None:
    """One check of level 4 fails and says what to declare; no process is started for the others."""
    begin = time.monotonic()
    results = run("no-backend", "distributed.*", "parallel.*", "train.processes")
    assert time.monotonic() - begin < 30
    assert failing(results) == {"train.processes"}
    assert results["train.processes"].detail == (
        "undeclared gap: the device does not offer a communication backend (its plugin brings none,"
        " and torch has none for this device type)"
    )
    others = [result for result in results.values() if result.status == "not run"]
    assert len(others) == len(results) - 2  # the fake declares that it cannot average
    assert {result.detail for result in others} == {"not reached: `train.processes` failed"}


def test_a_declared_missing_backend_is_a_gap(run: Any) -> None:
    """With the declaration, level 4 is not claimed, and nothing fails."""
    declaration = Declaration(closed={"distributed": "one chip per machine"})
    results = run("no-backend", "distributed.*", "train.processes", declaration=declaration)
    assert {result.status for result in results.values()} == {"declared gap"}


@pytest.mark.parametrize(
    "ability", ["compile", pytest.param("deterministic", marks=pytest.mark.full)]
)
def test_a_closed_ability_that_a_run_is_not_refused(run: Any, ability: str) -> None:
    """The finding names the flag and where the reason belongs; with a reason, nothing is wrong."""
    declaration = Declaration(closed={ability: "not on this chip"})
    name = "device.declaration"
    (found,) = run("", name, declaration=declaration)[name].findings
    assert found.startswith(
        f"`{ability}` is closed, and a run with `--{ability}` is not refused: it needs "
    )
    assert found.endswith(f'give the device the reason, by `missing={{"{ability}": ...}}`')
    result = run(f"without-{ability}", name, declaration=declaration)[name]
    assert (result.status, result.findings) == ("passed", ())


@pytest.mark.full
def test_a_refusal_that_is_not_declared(run: Any) -> None:
    """A device that refuses `--deterministic` declares it, or its check fails with the reason."""
    result = run("without-deterministic", "train.repeat")["train.repeat"]
    assert result.status == "failed"
    assert "undeclared gap: the device does not offer bitwise repeatable" in result.detail
    assert "(not on this chip)" in result.detail


def test_a_finding_of_one_process_goes_before_the_error_of_another() -> None:
    """The other process only lost its connection."""
    lost = Result("x", Status.FAILED, "it raised RuntimeError: reset", ("rank 0: it raised ...",))
    wrong = Result("x", Status.FAILED, "3 of 3 numbers are wrong", ("rank 1: 3 of 3 ...",))
    found = _joined([lost, wrong], many=True)
    assert (found.detail, found.findings) == (wrong.detail, (*wrong.findings, *lost.findings))


def test_kernels_of_generation_are_left_out_with_a_reason(run: Any) -> None:
    """A device that declares to have none is not asked for them."""
    reasons = {"constant_projection": "torch's are fast", "next_token_attention": "not written yet"}
    names = ("extras.projection-rows", "extras.next-token-slots")
    results = run("no-generation", *names, declaration=Declaration(closed=reasons))
    assert [(result.status, result.detail) for result in results.values()] == [
        ("declared gap", "`constant_projection` is closed: torch's are fast"),
        ("declared gap", "`next_token_attention` is closed: not written yet"),
    ]


def test_the_cores_host_copy_is_a_stager(run: Any) -> None:
    """A plugin without a checkpoint stager reaches level 1."""
    result = run("no-stager", "device.stagers")["device.stagers"]
    assert (result.status, result.detail) == ("passed", "host-copy")


def test_an_incomplete_level_names_its_checks() -> None:
    """The table has the checks that were not run, with the reason, and so has the JSON."""
    checks = all_checks()
    names = [check.id for check in checks if check.level == "L1"]
    results = {name: Result(name, Status.PASSED) for name in names}
    results["device.seed"] = Result("device.seed", Status.NOT_RUN, "no generator here")
    record = PluginRecord("x", "x", "lmcore-x", "1", PluginState.USABLE)
    report = make_report(
        Target(record, (), (), PluginSet(()), None), Declaration(), checks, results
    )
    (level,) = (level for level in report.to_dict()["levels"] if level["level"] == "L1")
    assert (level["verdict"], list(level["left"])) == ("incomplete", ["device.seed"])
    assert "  device.seed: no generator here" in render(report)


@pytest.mark.parametrize(
    "closed, verdict",
    [
        ("streams", "reached"),
        ("device.current-stream", "in part"),  # it has a requirement, which is not declared
        ("device.serialization", "in part"),  # it has none
    ],
)
def test_a_check_that_is_closed_by_its_id(closed: str, verdict: str) -> None:
    """Its level is reached in part, as a requirement of the suite does not excuse it."""
    checks = all_checks()
    declaration = Declaration(closed={closed: "not on this chip"})
    results = {
        check.id: Result(check.id, Status.GAP if declaration.why_closed(check) else Status.PASSED)
        for check in checks
    }
    record = PluginRecord("x", "x", "lmcore-x", "1", PluginState.USABLE)
    report = make_report(Target(record, (), (), PluginSet(()), None), declaration, checks, results)
    (level,) = (level for level in report.levels if level.level == "L1")
    assert level.verdict == verdict
    assert level.gaps > 0


def test_a_failure_says_how_to_declare_it() -> None:
    """A check without a requirement is closed by its id; others name their requirements."""
    checks = {check.id: check for check in all_checks()}
    result = Result("device.seed", Status.FAILED, "wrong", ("wrong",))
    line = '`"device.seed" = "the reason"`'
    assert line in _failure_text(checks["device.seed"], result, "")
    other = checks["device.current-stream"]
    assert "the reason" not in _failure_text(other, result, "")
    runner = Runner(Target(None, (), (), PluginSet(()), None), Declaration(), ())  # type: ignore[arg-type]
    gap = Result("device.seed", Status.GAP, "not offered")
    assert runner._permitted(checks["device.seed"], gap).findings == (
        "undeclared gap: not offered",
    )
    close = "offer it, or close `streams` or `events` in conformance.toml with the reason"
    assert runner._permitted(other, gap).findings == ("undeclared gap: not offered", close)


def test_a_collective_that_hangs(run: Any) -> None:
    """The check is given up, with the place of the rank that hangs; those after it are made."""
    names = ("distributed.all-reduce", "distributed.broadcast", "distributed.all-gather")
    results = run("hang-broadcast", *names, patience=0.15)
    assert failing(results) == {"distributed.broadcast"}
    assert "rank 1: no answer in time; stopped; it was in `hanging` (lmcore_fake/device.py" in (
        results["distributed.broadcast"].detail
    )


@pytest.mark.full  # test_a_report has the fake that does all but one thing, test_levels.py the CPU
def test_a_fake_that_behaves_passes(run: Any) -> None:
    """The checks that fail in the tests above pass without faults."""
    names = ("contract.*", "device.*", "train.precision-in-force")
    assert failing(run("", *names)) == set()


@pytest.mark.parametrize(
    "mode, names, broken, place",
    [
        ("hang-probe", "contract.*", "contract.probe", "`lmcore_probe` (lmcore_fake/plugin.py"),
        pytest.param(
            "hang-create",
            "device.create",
            "device.create",
            "`create` (lmcore_fake/device.py",
            marks=pytest.mark.full,  # the next one hangs in the same check
        ),
        (
            "hang-synchronize",  # a loop that is busy
            "device.create",
            "device.create",
            "`synchronize` (lmcore_fake/device.py",
        ),
    ],
)
def test_a_hang_is_found_soon(
    run: Any, monkeypatch: pytest.MonkeyPatch, mode: str, names: str, broken: str, place: str
) -> None:
    """A step without progress is ended after its silence, and the plugin's line is named."""
    from lmcore.plugin import discovery

    monkeypatch.setattr(discovery, "_TRIAL_SECONDS", 2.0)
    begin = time.monotonic()
    results = run(mode, *names.split(), patience=0.15)  # three seconds, in place of twenty
    assert time.monotonic() - begin < 40
    assert failing(results) == {broken}, results
    assert "no answer in time; stopped; it was in " + place in results[broken].detail
    others = {result.detail for name, result in results.items() if "not reached" in result.detail}
    assert all("hung" in detail or "lmcore_probe" in detail for detail in others)


def test_progress_is_no_hang() -> None:
    """A step of many functions may take longer than the silence, up to its own limit."""
    script = """
import time
from lmcore_conformance.process.watchdog import watched

def one(): time.sleep(0.05)
def other(): time.sleep(0.05)

with watched(0.7, {longest}):
    for _ in range(15): one(), other()
"""
    for longest, status in ((30.0, 0), (0.75, 1)):
        command = [sys.executable, "-c", script.format(longest=longest)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == status, done.stderr


def test_an_all_reduce_that_is_wrong_above_a_size(run: Any) -> None:
    """Small tensors are reduced rightly; the finding names the call and the size."""
    results = run("wrong-large-reduce", "distributed.all-reduce", "distributed.large", patience=3.0)
    assert results["distributed.all-reduce"].status == "passed", results
    large = results["distributed.large"]
    assert large.status == "failed"
    text = " ".join((large.detail, *large.findings))
    assert "all_reduce of 1,048,577 numbers: 1 of 1,048,577 numbers is wrong" in text
