"""The suite as users start it: pytest in a separate process, its output and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite import warm

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.base.errors import LmcoreError
from lmcore.contract.probe import API_VERSION
from lmcore.plugin import discover
from lmcore_conformance.declaration import read_declaration
from lmcore_conformance.registry import all_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def suite(tmp_path: Path, fake_site: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs pytest with the suite and the fake in an empty folder.

    Its processes are forked from one that has imported torch, except with `cold`: then they start
    as a user's do.
    """

    def start(
        *arguments: str,
        mode: str = "",
        pyargs: bool = True,
        cold: bool = False,
        sites: tuple[Path, ...] = (fake_site,),
    ) -> Any:
        from importlib.metadata import entry_points

        installed = any(
            point.name == "lmcore_conformance" for point in entry_points(group="pytest11")
        )
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        command += [] if cold else ["-p", "suite.calls"]
        command += [] if installed else ["-p", "lmcore_conformance.pytest_plugin"]
        command += ["--pyargs", "lmcore_conformance"] if pyargs else []
        inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = os.pathsep.join([*map(str, sites), *inherited])
        (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        run = subprocess.run if cold else warm.run
        return run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "FAKE": mode, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    return start


@pytest.mark.parametrize(
    "arguments, mode, status, expected",
    [
        (
            "--accelerator fake",
            "absent",
            2,
            ["is absent here; nothing was tested\nwhy: a fake on the bus"],
        ),
        (
            "--accelerator fake",
            "broken",
            2,
            ["is broken here; nothing was tested", "hint: plug it in"],
        ),
        (
            "--accelerator fake",
            "api",
            2,
            [f"why: it is built for the plugin API >=9, and this lmcore has {API_VERSION}"],
        ),
        (
            "--accelerator fake --levels L1",
            "no-import",
            2,
            [
                "plugin `fake` (lmcore-fake 1.0) cannot be used; level 0 alone can be tested",
                "raised ImportError: libfake.so.1: cannot open shared object file",
            ],
        ),
        (
            "--accelerator fke",
            "",
            2,
            [
                "error: `--accelerator fke`: no installed plugin has",
                "did you mean `fake`?",
            ],
        ),
        ("--accelerator fake --levels L9", "", 2, ["error: `--levels L9`: no such level"]),
        ("", "", 4, ["the conformance suite needs `--accelerator NAME`"]),
        ("--with x", "", 4, ["the conformance suite needs `--accelerator NAME`"]),
        (
            "--plugin x --accelerator fake",
            "",
            4,
            ["cannot be combined; `--accelerator fake --with x` tests both together"],
        ),
    ],
)
def test_nothing_can_be_tested(
    suite: Any, arguments: str, mode: str, status: int, expected: list[str]
) -> None:
    """The message has the evidence and what to do; the exit status is 2."""
    done = suite(*arguments.split(), mode=mode)
    assert done.returncode == status, done.stdout
    for text in expected:
        assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


WRONG_DECLARATIONS = [
    ('suite = ">=2"', "is for the suite >=2, and this is 1.2"),
    ("", "it does not say which versions of the suite it is for"),
    ('suite = ">=1"\n[closed]\nstreems = "no queues"', "did you mean `streams`?"),
    ('suite = ">=1"\n[closed]\nstreams = ""', "`closed` gives no reason for `streams`"),
    ('suite = ">=1"\n[open]\nstreams = "x"', "it has the unknown part `open`"),
    ('suite = ">=1', "cannot be read"),
    (
        'suite = ">=1"\n[closed]\nstreams = "not there"\n[depends]\nstreams = "on the chip"',
        "`streams` is closed and depends",
    ),
]


@pytest.mark.parametrize("text, expected", WRONG_DECLARATIONS)
def test_a_wrong_declaration(tmp_path: Path, text: str, expected: str) -> None:
    """The file is named with what is wrong."""
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LmcoreError) as error:
        read_declaration(file, all_checks())
    assert expected in error.value.render()
    assert "mine.toml" in error.value.render()


@pytest.mark.parametrize(
    "text, expected",
    [
        pytest.param(*declaration, marks=pytest.mark.full if place else ())
        for place, declaration in enumerate(WRONG_DECLARATIONS)
    ],
)
def test_nothing_is_tested_by_a_wrong_declaration(
    suite: Any, tmp_path: Path, text: str, expected: str
) -> None:
    """The message says what is wrong with the file, and nothing else."""
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    done = suite("--accelerator", "fake", "--requirements", str(file))
    assert done.returncode == 2, done.stdout
    assert expected in done.stdout
    assert "mine.toml" in done.stdout


def test_a_report(suite: Any, tmp_path: Path) -> None:
    """Table, badge and JSON agree; a gap shows its reason, a failure its findings."""
    file = tmp_path / "report.json"
    done = suite(
        *("--accelerator", "fake", "--levels", "L0,L1", "--conformance-json", str(file), "-rs"),
        mode="forgets-rng",
    )
    assert done.returncode == 1, done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    failed = {check["id"] for check in report["checks"] if check["status"] == "failed"}
    assert failed == {"device.rng-state", "device.rng-streams", "device.rng-recompute"}
    verdicts = {level["level"]: level["verdict"] for level in report["levels"]}
    assert verdicts == {
        "L0": "reached",
        "L1": "failed",
        **dict.fromkeys(("L2", "L3", "L4", "L5"), "not run"),
    }
    assert report["reached"] == ["L0"]
    assert report["plugin"] == {"name": "fake", "distribution": "lmcore-fake", "version": "1.0"}
    assert report["badge"] in done.stdout
    assert report["badge"].startswith("lmcore conformance 1.2: L0 | ")
    assert "`rand`: a restored state gives other numbers" in done.stdout
    assert "why it matters: Recomputation and `--load` restore states." in done.stdout
    assert "declared gap: `streams` is closed: there are no queues here" in done.stdout
    (level,) = (entry for entry in report["levels"] if entry["level"] == "L1")
    statuses = [check["status"] for check in report["checks"] if check["level"] == "L1"]
    assert level["gaps"] == statuses.count("declared gap") > 3
    assert level["claimed"] == pytest.approx(1 - level["gaps"] / level["checks"], abs=1e-3)


def test_a_report_on_a_plugin_without_a_device(
    suite: Any, tmp_path: Path, extra_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table, badge and JSON have a part for each device, with the plugin's contributions."""
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    file = tmp_path / "report.json"
    arguments = ("--plugin", "slowstager", "--levels", "L1,L2", "--conformance-json", str(file))
    done = suite(*arguments, sites=(extra_site,))
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    assert "  slowstager (lmcore-extra 0.3)\n    checkpoint stagers: slowstager\n" in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["plugin"]["name"] == "slowstager"
    (report,) = found["devices"]
    assert (report["device"], report["alone"], report["reached"]) == ("cpu", True, [])
    verdicts = {level["level"]: level["verdict"] for level in report["levels"]}
    assert (verdicts["L1"], verdicts["L2"], verdicts["L3"]) == (
        *("reached", "not applicable"),
        "not run",
    )
    brings = {plugin["name"]: plugin["brings"] for plugin in report["plugins"]}
    assert brings["slowstager"] == {"checkpoint_stagers": [{"name": "slowstager", "reason": ""}]}
    assert brings["cpu"] == {"device": "cpu"}


def test_claiming_nothing_is_seen(suite: Any, tmp_path: Path) -> None:
    """A level whose checks are all closed is not claimed, one whose core is closed not reached."""
    file = tmp_path / "closed.toml"
    ids = [f"device.{name}" for name in ("transfer", "copies", "distributions", "synchronize")]
    names = ("bfloat16", "float64", "float16", "memory_stats", "distributed", "host_apart")
    lines = ['suite = ">=1"', "[closed]", *(f'"{name}" = "not yet done"' for name in ids)]
    lines += [f'{name} = "not yet done"' for name in names]
    file.write_text("\n".join(lines), encoding="utf-8")
    arguments = ("--accelerator", "fake", "--requirements", str(file), "--levels", "L4")
    done = suite(*arguments)
    assert done.returncode == 0, done.stdout
    assert (
        "L4 distributed         27        0        0       27        0       0%  not claimed"
        in (done.stdout)
    )
    assert "lmcore conformance 1.2: none | 0 of " in done.stdout


def test_an_absent_device_keeps_the_contract(suite: Any) -> None:
    """`--levels L0` needs no device; what does is not run."""
    done = suite("--accelerator", "fake", "--levels", "L0", "-rs", mode="absent")
    assert done.returncode == 0, done.stdout
    assert "10 passed, 2 skipped" in done.stdout
    assert "not called: its device is absent here" in done.stdout


def test_a_plugin_that_cannot_be_imported_fails_what_is_selected(suite: Any) -> None:
    """All chosen checks are skipped, and the session ends with the error and its status."""
    done = suite("--accelerator", "fake", "-k", "device.seed", mode="no-import")
    assert done.returncode == 1, done.stdout
    assert "2 skipped" in done.stdout
    assert "raised ImportError: libfake.so.1: cannot open shared object file" in done.stdout


def test_in_an_authors_own_tests(suite: Any, tmp_path: Path) -> None:
    """A subclass in a file of tests runs its level; without the option it fails and says so."""
    (tmp_path / "test_mine.py").write_text(
        "from lmcore_conformance.suite import TestContract\n"
        "class TestMine(TestContract):\n"
        "    def test_more(self):\n"
        "        assert self.level == 'L0'\n",
        encoding="utf-8",
    )
    arguments = ("test_mine.py", "-k", "TestMine and (idempotent or more)")
    done = suite("--accelerator", "fake", *arguments, pyargs=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    done = suite("test_mine.py", "-k", "TestMine and not more", pyargs=False)
    assert done.returncode == 1
    assert "name the plugin under test: `--accelerator NAME`" in done.stdout


def test_only_what_is_selected_is_made(suite: Any, tmp_path: Path) -> None:
    """`-k` chooses checks; the device is created for them, and the rest is not run."""
    file = tmp_path / "report.json"
    arguments = ("--accelerator", "fake", "-k", "device.seed", "--conformance-json", str(file))
    done = suite(*arguments)
    assert done.returncode == 0, done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    made = [check["id"] for check in report["checks"] if check["status"] == "passed"]
    assert made == ["device.create", "device.seed", "device.seed-alone"]
    done = suite("--accelerator", "fake", "-k", "device.seed", mode="crash-create")
    assert done.returncode == 1, done.stdout
    assert "device.create: the process was killed by SIGSEGV" in done.stdout


@pytest.mark.full  # test_levels.py has the checks that matter most
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_a_device_reaches_every_level(suite: Any, tmp_path: Path, name: str) -> None:
    """Our own plugins pass all that they claim."""
    if name not in {plugin.name for plugin in discover(probe=False)}:
        pytest.skip(f"the plugin `{name}` is not installed")
    file = tmp_path / "report.json"
    done = suite("--accelerator", name, "--conformance-json", str(file), cold=True)
    assert done.returncode == 0, done.stdout
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["reached"] == ["L0", "L1", "L2", "L3", "L4", "L5"]
    assert report["claimed"] > 0.9
