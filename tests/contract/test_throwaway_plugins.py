"""Third-party plugins: built as wheels, installed in a separate environment, and used.

The environment is empty but for what this one has, lmcore's wheel among it.
"""

from __future__ import annotations

import json

import pytest
from suite.environment import VERSION

SMALL = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--train-iters", "3", "--eval-iters", "0", "--sample-tokens", "0"),
    *("--progress", "none", "--no-tensorboard"),
)


@pytest.fixture(scope="module")
def environment(throwaway_environment):
    """An environment with a good plugin, a broken one, a stale one, and one that crashes."""
    return throwaway_environment


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
    assert "it was in `<module>` (lmcore_crashing/plugin.py, line " in found["crashing"]["reason"]
    assert found["cpu"]["state"] == "usable"


def test_a_run_does_not_take_silence_for_absence(environment):
    """Plugins that cannot answer stop a run that names no device, with every cause."""
    before = set(environment.work.glob("runs/*"))  # of the other tests of this module
    found = environment.run("train", *SMALL)
    assert found.returncode == 2
    for cause in ("libfrobnicate.so.7", "SIGSEGV"):
        assert cause in found.stderr
    assert set(environment.work.glob("runs/*")) == before


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
    """Failed plugins make it fail; the checks of the good plugin and of its device pass."""
    found = environment.run_with_forks("doctor", "--json")
    assert found.returncode == 1, found.stderr
    groups = {one["name"]: one["checks"] for one in json.loads(found.stdout)["groups"]}
    by_plugin = {name.split()[1]: checks for name, checks in groups.items() if " " in name}
    good = {check["name"]: check["status"] for check in by_plugin["goodchip"]}
    assert good["temperature"] == "ok"
    assert "failed" not in good.values(), by_plugin["goodchip"]
    for name in ("broken", "stale", "crashing"):
        assert "failed" in {check["status"] for check in by_plugin[name]}
