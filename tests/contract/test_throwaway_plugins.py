"""Plugins by somebody else: built as wheels, installed in an environment of their own, and used.

The environment is empty but for what this one has, lmcore's wheel among it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "throwaway"
VERSION = "3.1.4"
HEAVY = """\
'''What takes long to load: leaves a mark where it was.'''
import os, pathlib
pathlib.Path(os.environ["HEAVY_MARK"]).touch()
"""
SMALL = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--train-iters", "3", "--eval-iters", "0", "--sample-tokens", "0"),
    *("--progress", "none", "--no-tensorboard"),
)


def build_wheel(name: str, folder: Path) -> Path:
    """Write the wheel of a distribution with one plugin; return its path."""
    package, info = f"lmcore_{name}", f"lmcore_{name}-{VERSION}.dist-info"
    files = {
        f"{package}/__init__.py": "",
        f"{package}/heavy.py": HEAVY,
        f"{package}/plugin.py": (SOURCES / f"{name}.py").read_text(encoding="utf-8"),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: lmcore-{name}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[lmcore.plugins]\n{name} = {package}.plugin\n",
    }
    rows = [f"{path},sha256={digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"lmcore_{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def digest(text: str) -> str:
    """Return a file's hash as RECORD has it."""
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def environment(new_environment):
    """An environment with a good plugin, a broken one, a stale one, and one that crashes."""
    made = new_environment()
    names = ("goodchip", "broken", "stale", "crashing")
    made.install(*(build_wheel(name, made.work) for name in names))
    return made


OTHERS = ("--plugin-off", "broken", "stale", "crashing")


def test_each_plugin_is_a_row_with_its_cause(environment):
    """None takes another, or the command, down."""
    found = environment.plugins(GOODCHIP_MODE="fast")
    assert found["goodchip"]["state"] == "usable"
    assert found["goodchip"]["evidence"] == ["GOODCHIP_MODE is fast"]
    assert (found["goodchip"]["distribution"], found["goodchip"]["version"]) == (
        "lmcore-goodchip",
        VERSION,
    )
    assert found["broken"]["state"] == "failed"
    assert "libfrobnicate.so.7" in found["broken"]["reason"]
    assert found["stale"]["state"] == "refused"
    assert ">=0.3,<1" in found["stale"]["reason"]
    assert found["crashing"]["state"] == "failed"
    assert "killed by SIGSEGV; it was in `string_at`" in found["crashing"]["reason"]
    assert found["cpu"]["state"] == "usable"


def test_a_run_does_not_take_silence_for_absence(environment):
    """Plugins that cannot answer stop a run that names no device, with every cause."""
    found = environment.run("train", *SMALL)
    assert found.returncode == 2
    for cause in ("libfrobnicate.so.7", "SIGSEGV"):
        assert cause in found.stderr
    assert not list(environment.work.glob("runs/*"))


@pytest.mark.parametrize(
    "how, env",
    [
        (("--device", "goodchip"), {}),
        (("--device", "goodchip", *OTHERS), {}),
        ((), {"LMCORE_DEVICE": "goodchip", "LMCORE_PLUGIN_OFF": "broken"}),
    ],
)
def test_somebody_elses_accelerator_is_chosen_by_name(environment, tmp_path, how, env):
    """Named by flag or variable it trains, with its own kernel, whatever else is installed."""
    save = tmp_path / "run"
    found = environment.run("train", *SMALL, "--save", str(save), *how, **env)
    assert found.returncode == 0, found.stderr
    assert json.loads((save / "summary.json").read_text())["iteration"] == 3
    record = json.loads((save / "environment.json").read_text())
    assert record["selection"]["plugin"] == "goodchip"
    assert record["device"]["name"] == "Good Chip 1"
    kernels = json.loads((save / "kernels.json").read_text())["ops"]
    assert {one["chosen"] for one in kernels if one["op"] == "layer_norm"} == {"good"}
    assert {one["plugin"] for one in kernels} <= {"goodchip", "lmcore"}


def test_only_the_chosen_plugins_heavy_packages_are_imported(environment, tmp_path):
    """Beside another device a present one costs no more than its probe."""
    mark = tmp_path / "mark"
    for words in (("plugins",), ("train", *SMALL, "--device", "cpu", *OTHERS)):
        found = environment.run(*words, HEAVY_MARK=str(mark))
        assert found.returncode == 0, found.stderr
        assert not mark.exists(), words
    found = environment.run("train", *SMALL, "--device", "goodchip", HEAVY_MARK=str(mark))
    assert found.returncode == 0, found.stderr
    assert mark.exists()


def test_the_allow_list_names_what_is_loaded(environment):
    """Empty, it leaves the CPU alone; what is not named is not imported."""
    found = environment.plugins(LMCORE_PLUGINS="")
    assert {one["state"] for name, one in found.items() if name != "cpu"} == {"off"}
    found = environment.plugins(LMCORE_PLUGINS="goodchip")
    assert (found["goodchip"]["state"], found["crashing"]["state"]) == ("usable", "off")


def test_the_doctor_sees_all_of_them(environment):
    """Failed plugins make it fail; the good one's own checks, and those of its device, pass."""
    found = environment.run_with_forks("doctor", "--json")
    assert found.returncode == 1, found.stderr
    groups = {one["name"]: one["checks"] for one in json.loads(found.stdout)["groups"]}
    by_plugin = {name.split()[1]: checks for name, checks in groups.items() if " " in name}
    good = {check["name"]: check["status"] for check in by_plugin["goodchip"]}
    assert good["temperature"] == "ok"
    assert "failed" not in good.values(), by_plugin["goodchip"]
    for name in ("broken", "stale", "crashing"):
        assert "failed" in {check["status"] for check in by_plugin[name]}


@pytest.mark.parametrize(
    "name, status, said",
    [
        ("goodchip", 0, "layer_norm"),
        ("broken", 1, "libfrobnicate.so.7"),
        ("stale", 1, ">=0.3,<1"),
        ("crashing", 1, "SIGSEGV"),
        ("nosuch", 2, "lmcore-nosuch"),
    ],
)
def test_authors_can_check_theirs(environment, name, status, said):
    """`lmcore plugin check` passes the good one and says what is wrong with the others."""
    found = environment.run("plugin", "check", f"lmcore-{name}")
    assert found.returncode == status, found.stdout + found.stderr
    assert said in found.stdout + found.stderr
