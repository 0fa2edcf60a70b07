"""Plugins from `lmcore plugin new`: installed in a separate environment, checked, used."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from lmcore_conformance.new_plugin.template import MARK, NewPlugin, render, write

ROOT = Path(__file__).resolve().parents[4]
TUTORIAL = ROOT / "docs" / "tutorial" / "write-a-plugin.md"
GOAL = 40
SMALL = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--train-iters", "3", "--eval-iters", "0", "--sample-tokens", "0"),
    *("--progress", "none", "--no-tensorboard"),
)
OWN_TESTS = ("--ignore-glob", "*/test_conformance.py")
PLUGINS = {
    "mychip": ("--torch-device", "cpu", "--licence", "mit", "--author", 'A. "B" C <a@b.example>'),
    "farchip": ("--torch-module", "torch_farchip"),
    "mytools": ("--without-device", "--licence", "proprietary"),
}


def with_kit(environment):
    """Return an environment in which the kit is."""
    environment.see("lmcore_conformance", "lmcore-conformance")
    return environment


@pytest.fixture(scope="module")
def environment(new_environment):
    """An environment with a plugin of each kind, each written and installed as its author would."""
    made = with_kit(new_environment())
    for name, flags in PLUGINS.items():
        written = made.run("plugin", "new", name, *flags)
        assert written.returncode == 0, written.stderr
        (made.work / f"{name}.txt").write_text(written.stdout, encoding="utf-8")
    made.install_source(*(made.work / f"lmcore-{name}" for name in PLUGINS))
    return made


def check(environment, name):
    """Return what `lmcore plugin check` finds, by the step's name."""
    found = environment.run("plugin", "check", f"lmcore-{name}", "--json")
    (plugin,) = json.loads(found.stdout)["plugins"]
    assert (found.returncode, plugin["passed"]) == (0, True), found.stdout
    return {check["name"]: check["status"] for check in plugin["checks"]}


def test_a_new_plugin_is_what_it_says(environment):
    """The host is the device on request only; otherwise the device is absent, with a reason."""
    found = environment.plugins()
    assert {found[name]["state"] for name in PLUGINS} == {"usable"}
    assert "stands in" in found["mychip"]["evidence"][0]
    assert found["mychip"]["device_state"] == "present"
    assert found["farchip"]["device_state"] == "absent"
    assert found["farchip"]["evidence"] == ["no /dev/farchip[0-9]*"]
    assert found["mytools"]["device_state"] is None


@pytest.mark.parametrize(
    "name",
    # Its own tests check it, too.
    [pytest.param("mychip", marks=pytest.mark.full), "farchip", "mytools"],
)
def test_a_new_plugin_keeps_to_the_contract(environment, name):
    """`lmcore plugin check` finds nothing wrong, and skips only what an absent device leaves."""
    statuses = check(environment, name)
    expected = {"ok", "skipped"} if name == "farchip" else {"ok"}
    assert set(statuses.values()) == expected, statuses


@pytest.mark.parametrize("name", PLUGINS)
def test_a_new_plugin_passes_its_own_tests(environment, name):
    """They run as they are, losses against the CPU's among them; what is skipped says why."""
    folder = environment.work / f"lmcore-{name}"
    found = environment.pytest(*OWN_TESTS, str(folder))
    assert found.returncode == 0, found.stdout + found.stderr
    reasons = set(re.findall(r"^SKIPPED .*?: (.*)$", found.stdout, re.MULTILINE))
    absent = {"the device is absent: no /dev/farchip[0-9]*"}
    expected = absent if name == "farchip" else set()
    assert reasons == expected


_OTHER_SEARCH = """\
def probe() -> Probe:
    return Probe("farchip", ProbeState.ABSENT, evidence=("no /sys/class/farchip",))


def unused(folder: Path) -> Probe:"""

OTHER_PROBES = {
    "another pattern": ('NODES = "farchip[0-9]*"', 'NODES = "accel/farchip*"'),
    "another search": ('def probe(folder: Path = Path("/dev")) -> Probe:', _OTHER_SEARCH),
    "no constants": ("NODES", "FILES"),
}


@pytest.mark.parametrize("case", OTHER_PROBES)
def test_tests_of_the_probe_fit_another_probe(case, tmp_path):
    """An author's own search takes the place of the template's, and no test of it breaks."""
    files = render(NewPlugin("farchip", "farchip", "torch", "MIT", "Nobody", 2026))
    before, after = OTHER_PROBES[case]
    assert before in files["src/lmcore_farchip/probe.py"]
    files["src/lmcore_farchip/probe.py"] = files["src/lmcore_farchip/probe.py"].replace(
        before, after
    )
    write(files, tmp_path / "plugin")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_probe.py"]
    source = os.pathsep.join([str(tmp_path / "plugin/src"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        command,
        cwd=tmp_path / "plugin",
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    count = "4 passed" if case == "another pattern" else "1 passed, 3 skipped"
    assert count in found.stdout


def test_the_template_creates_one_device_for_all_tests():
    """The contract has one `lmcore_create_device` in a process; comments name what is lazy."""
    files = render(NewPlugin("farchip", "farchip", "torch", "MIT", "Nobody", 2026))
    conftest = ast.parse(files["tests/conftest.py"])
    (device,) = (
        node
        for node in conftest.body
        if isinstance(node, ast.FunctionDef) and node.name == "device"
    )
    assert [ast.unparse(mark) for mark in device.decorator_list] == [
        "pytest.fixture(scope='session')"
    ]
    for name in ("`step_boundary=`", "`index=`", "`inference_mode=False`", "lazy-devices.md"):
        assert name in files["src/lmcore_farchip/device.py"]


def test_nobody_gets_the_trial_device_without_asking(environment, tmp_path):
    """Beside the new plugins a run without `--device` is the CPU's."""
    found = environment.run("train", *SMALL, "--save", str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert record["selection"]["plugin"] == "cpu"


def test_training_works_on_a_new_plugin_at_once(environment, tmp_path):
    """`--device NAME` uses it."""
    found = environment.run("train", *SMALL, "--device", "mychip", "--save", str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert record["selection"]["plugin"] == "mychip"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iteration"] == 3


def test_a_new_plugin_without_its_device_cannot_be_trained_on(environment):
    """A request by name is an error with the evidence, and never uses the CPU."""
    found = environment.run("train", *SMALL, "--device", "farchip")
    assert found.returncode == 2
    assert "no /dev/farchip[0-9]*" in found.stderr


@pytest.fixture(scope="module")
def own_chip(new_environment):
    """An environment with a plugin for a device that torch knows, and a folder as its /dev.

    The library of the simulated device replaces a vendor's package; its plugin is not there.
    """
    library = importlib.util.find_spec("lmcore_sim")
    if library is None or not list(Path(library.origin).parent.glob("_C.*.so")):
        pytest.skip("`lmcore-sim`, whose library makes a device known to torch, is not installed")
    made = with_kit(new_environment())
    made.see("lmcore_sim")
    (made.work / "dev").mkdir()
    for number in range(2):
        (made.work / "dev" / f"mychip{number}").touch()
    flags = ("--torch-device", "sim", "--torch-module", "lmcore_sim.torch_backend")
    written = made.run("plugin", "new", "mychip", *flags)
    assert written.returncode == 0, written.stderr
    probe = made.work / "lmcore-mychip" / "src" / "lmcore_mychip" / "probe.py"
    text = probe.read_text(encoding="utf-8")
    assert text.count('Path("/dev")') == 1
    probe.write_text(text.replace('Path("/dev")', f'Path("{made.work / "dev"}")'))
    made.install_source(made.work / "lmcore-mychip")
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts a dozen processes one after the other
def test_a_generated_plugin_for_a_torch_device_works_unchanged(own_chip, tmp_path):
    """Once its nodes are found, check, own tests, doctor and training pass, on the device."""
    checks = check(own_chip, "mychip")
    assert set(checks.values()) == {"ok"}, checks
    folder = own_chip.work / "lmcore-mychip"
    found = own_chip.pytest(*OWN_TESTS, str(folder))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "the device is" not in found.stdout
    found = own_chip.run_with_forks("doctor", "--json")
    groups = {group["name"]: group["checks"] for group in json.loads(found.stdout)["groups"]}
    (doctor,) = (checks for name, checks in groups.items() if name.startswith("plugin mychip"))
    assert {check["status"] for check in doctor} == {"ok"}, doctor
    assert "`simccl`" in next(check["detail"] for check in doctor if check["name"] == "all-reduce")
    found = own_chip.run("train", *SMALL, "--device", "mychip", "--save", str(tmp_path / "run"))
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert record["selection"]["plugin"] == "mychip"
    assert (record["device"]["type"], record["selection"]["probe"]["count"]) == ("sim", 2)


def conform(environment, name):
    """Run the conformance suite as the plugin's own tests do."""
    path = environment.work / f"lmcore-{name}" / "tests" / "test_conformance.py"
    found = environment.pytest("-rs", str(path))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 passed" in found.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_new_plugin_conforms(environment):
    """Claimed abilities work, and missing ones are declared.

    Levels 4 and 5, collectives between processes and extras, use the CPU's functions: the CPU
    plugin's tests cover them.
    """
    arguments = (
        "--pyargs",
        "lmcore_conformance",
        "--accelerator",
        "mychip",
        "--levels",
        "L0,L1,L2,L3",
    )
    found = environment.pytest("-rs", *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"L3 training .* reached", found.stdout), found.stdout


@pytest.mark.timeout(300)
def test_a_new_plugin_conforms_without_its_device(environment):
    """Its own test takes it through level 0, which needs no device."""
    conform(environment, "farchip")


@pytest.mark.timeout(300)
def test_a_new_plugin_passes_some_checks(environment):
    """The contract, and a curve of losses: the rest is in the full set."""
    arguments = ("--pyargs", "lmcore_conformance", "--accelerator", "mychip", "--levels", "L0,L3")
    found = environment.pytest("-rs", *arguments, "-k", "contract or train.curve")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "13 passed" in found.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_torch_device_conforms(own_chip):
    """The first declaration has all that such a device lacks."""
    conform(own_chip, "mychip")


def code_lines(text):
    """Return how many lines have code: no comments, docstrings or empty ones."""
    described = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, described) and ast.get_docstring(node) is not None:
            docstring_lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in {*nothing, tokenize.ENDMARKER}:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstring_lines)


def test_a_working_backend_is_few_lines():
    """All code of a device that torch knows is under the goal, and as long as the tutorial says."""
    counts = {}
    for torch_device, module in (("cpu", "torch"), ("chip", "torch"), ("chip", "torch_chip")):
        files = render(NewPlugin("chip", torch_device, module, "MIT", "Nobody", 2026))
        sources = (text for path, text in files.items() if re.match(r"src/.*\.py$", path))
        counts[torch_device, module] = sum(map(code_lines, sources))
    assert all(10 < count < GOAL for count in counts.values())
    text = TUTORIAL.read_text(encoding="utf-8")
    assert f"**{counts['chip', 'torch']} lines of code**" in text
    assert f"one more with `--torch-module` ({counts['chip', 'torch_chip']})" in text
    assert f"{counts['cpu', 'torch']} with the host" in text


def test_the_tutorial_shows_what_is_printed(environment):
    """The first command's output there is the command's."""
    text = (environment.work / "mychip.txt").read_text(encoding="utf-8")
    assert f"$ lmcore plugin new mychip --torch-device cpu\n{text}```" in TUTORIAL.read_text()


def test_reported_line_count_is_right():
    """Docstrings, comments and empty lines are no code; each line of a statement is."""
    head = '"""One\n\ntwo."""\n\nx = (\n    1,  # one\n)\n# no\n'
    body = 'def f():\n    """Say."""\n    return """a\nb"""\n'
    assert (code_lines(head), code_lines(body)) == (3, 3)


def test_what_is_marked_is_what_the_readme_says(environment):
    """Each file with `EDIT` in it is in the README's list, and no other."""
    folder = environment.work / "lmcore-farchip"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    marked = {
        path.relative_to(folder).as_posix()
        for path in files
        if MARK in path.read_text(encoding="utf-8") and "build" not in path.parts
    }
    listed = set(re.findall(r"^\d\. `([^`]+)`", (folder / "README.md").read_text(), re.MULTILINE))
    assert marked == listed
