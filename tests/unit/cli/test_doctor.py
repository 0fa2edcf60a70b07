"""`lmcore doctor`: plugins and devices that work, fail, crash or hang, each a row of the report."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator

import pytest
from suite import warm

from lmcore.cli import doctor as doctor_command
from lmcore.cli.doctor import core_checks, plugin_checks
from lmcore.cli.main import main
from lmcore.contract import CheckStatus
from lmcore.data import native
from lmcore.plugin import PluginRecord, PluginSet, PluginState, discover
from lmcore.plugin.isolation import subprocess_call as isolated
from lmcore.plugin.isolation.subprocess_call import Outcome, call_together

SOURCE = """
import dataclasses, os, sys, time
from lmcore.contract import CommBackend, Check, CheckStatus, PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl
from lmcore_cpu import plugin as cpu

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("patient", ">=1,<2")

@hookimpl
def lmcore_probe():
    facts = {{"driver": "5.1", "runtime": "chips 7", "cards": [1, 2]}}
    state = ProbeState.{state}
    return Probe("{device}", state, {count}, 50, ("seen",), "see a smith", facts)

@hookimpl
def lmcore_doctor(probe):
    print("noise on standard output")
    {body}

@hookimpl
def lmcore_launch_env(rank_info):
    return {{"PATIENT_RANK": str(rank_info["rank"])}}

def crash():
    os.kill(os.getpid(), 11)

@hookimpl
def lmcore_create_device(config):
    device = cpu.lmcore_create_device(config=config)
    {create}
    return device

@hookimpl
def lmcore_comm_backends():
    {backends}
    return cpu.lmcore_comm_backends()
"""
ONE_CHECK = 'return [Check("pulse", CheckStatus.{}, "60", "run less")]'
HEALTHY = ONE_CHECK.format("OK")


@pytest.fixture(autouse=True, scope="module")
def warm_checks() -> Iterator[None]:
    """Processes of the checks are forked from one that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "subprocess", warm.SUBPROCESS)
        yield


@pytest.fixture
def clinic(tmp_path, monkeypatch):
    """Return a function that installs one plugin, made of these parts, and gives its record."""

    def admit(
        body: str = HEALTHY, state: str = "PRESENT", create: str = "", backends: str = ""
    ) -> tuple[PluginRecord, PluginSet]:
        count = 0 if state == "ABSENT" else 1
        device = "cpu" if state == "PRESENT" else "chip"
        source = SOURCE.format(
            body=body, state=state, count=count, device=device, create=create, backends=backends
        )
        (tmp_path / "patient_plugin.py").write_text(textwrap.dedent(source), encoding="utf-8")
        info = tmp_path / "lmcore_patient-0.9.dist-info"
        info.mkdir()
        metadata = "Metadata-Version: 2.1\nName: lmcore-patient\nVersion: 0.9\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        points = "[lmcore.plugins]\npatient = patient_plugin\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "patient_plugin", raising=False)
        monkeypatch.setenv("LMCORE_PLUGINS", "patient")
        for name in ("LMCORE_DEVICE", "LMCORE_PLUGIN_OFF", "LMCORE_SELECTION"):
            monkeypatch.delenv(name, raising=False)
        plugins = discover()
        return plugins.usable_record("patient"), plugins

    return admit


@pytest.fixture
def rows(clinic):
    """Return a function that gives the checks, by name, of a plugin made of these parts."""

    def examine(timeout: float = 60.0, **parts: str) -> dict:
        record, plugins = clinic(**parts)
        return {check.name: check for check in plugin_checks(record, plugins, timeout)}

    return examine


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Return a function that runs the command here, and gives its status and what it printed."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def checks_of(found: dict, group: str) -> dict:
    (checks,) = [one["checks"] for one in found["groups"] if one["name"].startswith(group)]
    return {check["name"]: check for check in checks}


# The command


def test_the_report_of_a_healthy_installation(clinic, doctor):
    """Each plugin has versions, probe, own checks and the smoke test; all pass, in both forms."""
    clinic()
    status, out = doctor("--json")
    assert status == 0, out
    found = json.loads(out)
    assert found["passed"]
    checks = checks_of(found, "plugin patient (lmcore-patient 0.9)")
    assert list(checks) == [
        *("works with", "versions", "device cpu", "pulse", "device works"),
        *("product bfloat16", "product float16", "product float32", "product float64"),
        *("random state", "precision", "all-reduce"),
    ]
    assert {check["status"] for check in checks.values()} == {"ok"}
    assert checks["pulse"] == {
        "name": "pulse", "status": "ok", "detail": "60", "fix": "run less"
    }  # fmt: skip
    assert checks["versions"]["detail"] == "driver 5.1, runtime chips 7"
    assert checks_of(found, "plugin cpu")["all-reduce"]["status"] == "ok"
    assert checks_of(found, "lmcore")["device"]["detail"].startswith("a run uses `cpu`")


def test_the_text_is_one_aligned_line_for_each_check(clinic, doctor):
    """Every check begins with its status; a fix is below it once; the last line counts."""
    clinic(body="os.kill(os.getpid(), 11)", state="BROKEN")
    status, out = doctor()
    assert status == 1
    lines = out.splitlines()
    start = lines.index("plugin patient (lmcore-patient 0.9)")
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["ok", "ok", "failed"]
    assert lines[start + 4].strip() == "fix: see a smith"
    assert lines[start + 4].index("fix:") == lines[start + 3].index("broken: seen")
    assert ", 3 failed" in lines[-1]  # the choice, the device, the plugin's checks
    assert not any(line.endswith(" ") for line in lines)


def test_a_plugin_left_out_is_one_skipped_line(clinic, doctor):
    """`--plugin-off` works here as elsewhere, and reaches the processes of the checks."""
    clinic(body="os.kill(os.getpid(), 11)")
    status, out = doctor("--json", "--plugin-off", "patient")
    assert status == 0, out
    (check,) = checks_of(json.loads(out), "plugin patient").values()
    assert (check["status"], check["detail"]) == ("skipped", "`--plugin-off` leaves it out")


@pytest.mark.full  # its parts are tried one by one here, and without the forks by test_isolated.py
def test_the_command_as_a_process(clinic):
    """All of it works from a shell, with separate interpreters for the checks."""
    clinic(body="os.kill(os.getpid(), 11)")
    done = subprocess.run(
        [sys.executable, "-m", "lmcore.cli.main", "doctor", "--json", "--plugin-off", "patient"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["passed"]


# A plugin's own checks


@pytest.mark.parametrize("status", ["OK", "WARNING", "FAILED"])
def test_own_checks_are_rows(rows, status):
    """The status and the fix of a plugin's checks are taken over."""
    check = rows(body=ONE_CHECK.format(status), state="ABSENT")["pulse"]
    assert (check.status, check.fix) == (status.lower(), "run less")


@pytest.mark.parametrize(
    "body, words",
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("os._exit(7)", "status 7"),
        ('raise OSError("no pulse")', "no pulse"),
        ('return ["fine"]', "list of `Check`"),
        ("return None", "list of `Check`"),
    ],
)
def test_a_crash_of_own_checks_is_a_row(rows, body, words):
    """Native crashes, exits, exceptions and wrong answers end in one failed line."""
    check = rows(body=body, state="ABSENT")["checks"]
    assert check.status is CheckStatus.FAILED
    assert words in check.detail
    assert "lmcore-patient" in check.fix


def test_hanging_own_checks_are_stopped(rows):
    """The time limit ends them, and the function that hangs is named."""
    check = rows(body="time.sleep(1000)", state="ABSENT", timeout=3.0)["checks"]
    assert check.status is CheckStatus.FAILED
    assert "no answer within 3 s; stopped; it was in `lmcore_doctor`" in check.detail
    assert "--timeout 300" in check.fix


# The smoke test of a present device


def test_a_crash_in_the_devices_creation_is_a_row(rows):
    """Nothing can be tried after it; the all-reduce names the rank that crashed."""
    found = rows(create="crash()")
    assert found["pulse"].status is CheckStatus.OK
    for name in ("device works", "all-reduce"):
        assert found[name].status is CheckStatus.FAILED
        assert "was killed by SIGSEGV; it was in `crash`" in found[name].detail
        assert "lmcore-patient" in found[name].fix
    assert found["all-reduce"].detail.startswith("rank ")
    assert "product float32" not in found


def test_a_crash_of_one_rank_names_that_rank(rows, monkeypatch):
    """The other's words, that its neighbour stopped, say less."""
    together = functools.partial(call_together, grace=0.5)  # the other can only wait
    monkeypatch.setattr(doctor_command, "call_together", together)
    found = rows(create='crash() if os.environ["PATIENT_RANK"] == "1" else None')
    assert found["device works"].status is CheckStatus.OK
    assert found["all-reduce"].detail.startswith("rank 1: the process was killed by SIGSEGV")


def test_a_crash_amid_the_checks_keeps_those_before_it(rows):
    """The check that had begun is the one that failed."""
    found = rows(create="device = dataclasses.replace(device, get_rng_state=crash)")
    assert found["product float64"].status is CheckStatus.OK
    assert found["random state"].status is CheckStatus.FAILED
    assert "SIGSEGV" in found["random state"].detail
    assert found["all-reduce"].status is CheckStatus.OK


def test_what_raises_is_a_row_and_the_next_check_goes_on(rows):
    """An exception on the device is reported with its type."""
    found = rows(
        create="def broken(): raise OSError('stuck')\n"
        "    device = dataclasses.replace(device, synchronize=broken)"
    )
    assert found["product float32"].detail == "OSError: stuck"
    assert found["random state"].status is CheckStatus.OK
    assert found["precision"].status is CheckStatus.OK


def test_a_precision_that_is_not_in_force_is_a_row(rows):
    """Each policy is verified; the row names failed policies and their products."""
    found = rows(
        create="import torch\n"
        "    plain = torch.Tensor.__matmul__\n"
        "    def widened(x, y):\n"
        "        with torch.autocast('cpu', enabled=False):\n"
        "            return plain(x.float(), y.float()).to(x.dtype)\n"
        "    torch.Tensor.__matmul__ = widened"
    )
    assert found["random state"].status is CheckStatus.OK
    assert found["precision"].status is CheckStatus.FAILED
    assert (
        "precision `bf16` is not applied on device `cpu`: 6 of 12 products"
        in found["precision"].detail
    )
    assert "--precision fp32" in found["precision"].fix


def test_a_device_that_cannot_be_made_has_the_plugins_words(rows):
    """The message and the reason are the detail, the hint is the fix."""
    found = rows(
        create="from lmcore.base.errors import DeviceError\n"
        "    raise DeviceError('it is asleep', why='night', hint='wake it')"
    )
    assert found["device works"].detail.startswith("it is asleep: night")
    assert found["device works"].fix == "wake it"


def test_a_generator_that_forgets_is_found(rows):
    """A state that does not bring the same numbers back means that no run can be continued."""
    found = rows(create="device = dataclasses.replace(device, set_rng_state=lambda state: None)")
    assert found["random state"].status is CheckStatus.FAILED
    assert "restored, it gives other numbers than before" in found["random state"].detail


@pytest.mark.parametrize(
    "health, status, detail",
    [
        ("lambda: None", CheckStatus.OK, "the plugin reports no fault, in "),
        ("lambda: 'too hot'", CheckStatus.FAILED, "too hot"),
        ("lambda: time.sleep(0.2)", CheckStatus.WARNING, "the plugin reports no fault, in 2"),
    ],
)
def test_the_health_of_a_device_is_a_row(rows, health, status, detail):
    """A check that is too slow for a run is a warning; without one there is no row."""
    found = rows(create=f"device = dataclasses.replace(device, health={health})")["health"]
    assert found.status is status
    assert found.detail.startswith(detail)


def test_a_device_that_hangs_is_stopped(rows, monkeypatch):
    """Its row says where it hangs, and the all-reduce has one too."""
    # Only the first has to come so far before it is stopped that it hangs in the plugin.
    shortly = functools.partial(call_together, timeout=1.0)
    monkeypatch.setattr(doctor_command, "call_together", lambda calls, timeout: shortly(calls))
    found = rows(create="time.sleep(1000)", timeout=4.0)
    assert "stopped; it was in `lmcore_create_device`" in found["device works"].detail
    assert found["all-reduce"].status is CheckStatus.FAILED


def test_without_a_communication_backend_one_process_can_work(rows):
    """A missing backend is a warning, with the backend's reason."""
    found = rows(
        backends='return [CommBackend("gloo", "cpu", available=lambda: "the cable is out")]'
    )
    assert found["all-reduce"].status is CheckStatus.WARNING
    assert "the cable is out" in found["all-reduce"].detail
    assert found["device works"].status is CheckStatus.OK


@pytest.mark.parametrize("state, wanted", [("ABSENT", "skipped"), ("BROKEN", "failed")])
def test_a_device_that_is_not_present_is_not_tried(rows, state, wanted):
    """Its probe is a row; hardware that is not there is no fault."""
    found = rows(state=state)
    assert list(found) == ["works with", "versions", "device chip", "pulse"]
    assert found["device chip"].status == wanted
    assert found["device chip"].fix == "see a smith"


@pytest.mark.parametrize(
    "device, count, facts, ranks",
    [
        *(("cpu", 1, {}, 2), ("chip", 1, {}, 1), ("chip", 8, {}, 2)),
        *(("chip", 1, {"on_host": True}, 2), ("chip", 1, {"on_host": False}, 1)),
    ],
)
def test_the_all_reduce_has_two_ranks_where_there_are_two_devices(
    clinic, monkeypatch, device, count, facts, ranks
):
    """On the host any number of processes works; another device is one process's own."""
    record, plugins = clinic()
    probe = types.SimpleNamespace(**{**record.probe.to_dict(), "device_type": device})
    probe.count, probe.facts = count, facts
    places = []

    def together(calls, timeout):
        places.extend((call.env["RANK"], call.env["WORLD_SIZE"]) for call in calls)
        found = {"name": "all-reduce", "status": "ok", "detail": "fine", "fix": None}
        return [Outcome((found,), "", "", 1.0) for _ in calls]

    monkeypatch.setattr(doctor_command, "call_together", together)
    monkeypatch.setattr(doctor_command, "_worker_env", lambda one, all_, place: place.to_env())
    whole = types.SimpleNamespace(probe=probe, distribution=record.distribution)
    assert doctor_command._all_reduce(whole, plugins, 10.0).detail == "fine"
    assert places == [(str(rank), str(ranks)) for rank in range(ranks)]


# Plugins out of service


@pytest.mark.parametrize(
    "state, status",
    [("off", "skipped"), ("failed", "failed"), ("refused", "failed")],
)
def test_a_plugin_out_of_service_is_one_line(state, status):
    """Its reason is the detail."""
    one = PluginRecord("chip", "chip", "lmcore-chip", "1", PluginState(state), "cracked")
    (check,) = plugin_checks(one, PluginSet((one,)), 1.0)
    assert (check.status, check.detail) == (status, "cracked")


def checks() -> dict:
    return {check.name: check for check in core_checks(PluginSet(()))}


def test_the_core_is_checked():
    """Interpreter, packages, native code, disk and device each have a line."""
    names = list(checks())
    assert names[:2] == ["python", "packages"]
    assert names[-3:] == ["native code", "disk", "device"]


def test_a_missing_native_builder_is_a_warning_with_its_fix(monkeypatch):
    """The Python version works, so it is a warning, and the fix is named."""
    monkeypatch.setattr(native, "available", False)
    monkeypatch.setattr(native, "reason", "installed without a compiler")
    check = checks()["native code"]
    assert check.status is CheckStatus.WARNING
    assert check.detail == "installed without a compiler"
    assert check.fix == "install a C++ compiler (g++), then install lmcore again from its folder"


def test_a_deleted_working_directory_is_a_failure(monkeypatch):
    """The check names it, and the other checks are made."""

    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(doctor_command.Path, "cwd", gone)
    assert checks()["disk"].status is CheckStatus.FAILED


@pytest.mark.parametrize("free, status", [(10**12, "ok"), (10**9, "warning"), (10**7, "failed")])
def test_little_disk_space_is_reported(monkeypatch, free, status):
    """Less than 5 GB is a warning, less than 0.1 GB a failure."""
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(doctor_command.shutil, "disk_usage", lambda folder: usage)
    assert checks()["disk"].status == status


def test_packages_out_of_range_or_missing_are_failures(monkeypatch):
    """Each has the range that is needed and the command that brings it."""
    needs = ["numpy>=2.0", "torch>=99", "nonesuch>=1", 'other; extra == "test"']
    monkeypatch.setattr(doctor_command.importlib.metadata, "requires", lambda name: needs)
    found = checks()
    assert found["torch"].status is CheckStatus.FAILED
    assert ">=99" in found["torch"].detail
    assert found["nonesuch"].fix == "pip install 'nonesuch>=1'"
    assert "numpy" in found["packages"].detail
    assert "other" not in found
