"""The reference pages say what the code does."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcore.cli.commands import GROUPS, known_commands
from lmcore.cli.main import main
from lmcore.config.foreign import megatron
from lmcore.config.preset import PRESETS
from lmcore.config.section import run_options
from lmcore.train.report.run_directory import RunDirectory
from lmcore.train.step_record import StepRecord

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    path = ROOT / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


GENERATOR = load("docs/generate.py")


@pytest.mark.parametrize("path", GENERATOR.PAGES)
def test_page_is_up_to_date(path: str) -> None:
    """Each generated file is what the code makes now; a new flag is thereby a visible decision."""
    made = GENERATOR.PAGES[path]()
    assert made == (ROOT / path).read_text(encoding="utf-8"), "run `python docs/generate.py`"


def page(name: str) -> str:
    return (ROOT / "docs/reference" / name).read_text(encoding="utf-8")


def test_everything_appears() -> None:
    """Every option, preset, old flag and command is on its page."""
    for name in run_options():
        assert f"| `{name}` |" in page("options.md")
    for name in PRESETS:
        assert f"| `{name}` |" in page("presets.md")
    for name in (*megatron.RENAMED, *megatron.FIXED, *megatron.UNSUPPORTED):
        assert f"| `{name}" in page("megatron-flags.md")
    inner = [one for group in GROUPS.values() for one in group]
    for one in (*known_commands().values(), *inner):
        assert f"\n## `lmcore {one.name}`\n" in page("commands.md")


def test_guide_names_real_options() -> None:
    """The flags and YAML keys in the guide to configuration exist."""
    text = (ROOT / "docs/how-to/configure.md").read_text(encoding="utf-8")
    known = {one.flag for one in run_options().values()}
    known |= {f"--no-{one.flag[2:]}" for one in run_options().values() if one.type is bool}
    known |= {flag for one in GENERATOR._cpu_sections().options.values() for flag in one.flags}
    known |= {*megatron.RENAMED, *megatron.FIXED, *megatron.UNSUPPORTED}
    known |= {"--preset", "--defaults", "--continue", "--help", "--json", "--no"}
    assert set(re.findall(r"--[a-z][a-z-]*[a-z]", text)) <= known


def test_the_guide_from_intels_megatron_knows_each_flag() -> None:
    """Flags of the left column are read here, or the right one says refused, or unknown."""
    text = (ROOT / "docs/how-to/move-from-intel-gpus.md").read_text(encoding="utf-8")
    ours = {flag for one in run_options().values() for flag in one.flags}
    read = ours | {*megatron.RENAMED, *megatron.FIXED} | {f"--no-{flag[2:]}" for flag in ours}
    refused = {*megatron.UNSUPPORTED}
    section = text.partition("\n## Flags\n")[2].partition("\n## Data\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    flags = [(flag, after) for now, after in rows for flag in re.findall(r"--[a-z][\w-]*", now)]
    assert len(flags) > 20
    for flag, after in flags:
        name = flag.replace("_", "-")
        if after.startswith("refused"):
            assert name in refused, flag
        elif after.startswith("unknown"):
            assert name not in read | refused, flag
        else:
            assert name in read, flag


def keys(heading: str) -> list[str]:
    """Return the first column of the table below *heading* of the run directory's page."""
    _, found, below = f"\n{page('run-directory.md')}".partition(f"\n{heading}\n")
    assert found, heading
    return re.findall(r"^\| `([^`]+)` \|", below.partition("\n## ")[0], re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step on the bundled text, with a validation, a sample and a checkpoint."""
    directory = tmp_path_factory.mktemp("run") / "one"
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 1"
        " --micro-batch-size 2 --eval-iters 1 --sample-tokens 2 --num-threads 1 --progress none"
        " --log-params-norm --log-num-zeros-in-grad --log-memory-to-tensorboard"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORLD_SIZE", "LMCORE_DEVICE", "LMCORE_PLUGINS"):
            patch.delenv(name, raising=False)
        assert main(["train", *flags.split(), "--device", "cpu", "--save", str(directory)]) == 0
    return RunDirectory(directory)


def test_every_file_of_a_run_is_documented(run: RunDirectory) -> None:
    """The page lists what a run leaves, no more and no less, with the names of `RunDirectory`."""
    listed = keys("# Run directory")
    assert sorted(listed) == sorted(
        f"{one.name}/" if one.is_dir() else one.name for one in run.path.iterdir()
    )
    named = (run.checkpoints, run.metrics, run.tokenizer, run.data)
    assert {one.name for one in named} <= {name.rstrip("/") for name in listed}


def test_every_metric_is_documented(run: RunDirectory) -> None:
    """The page lists the fields of a row, in their order, and a row has no others."""
    listed = keys("## `metrics.jsonl`")
    assert listed == [one.name for one in dataclasses.fields(StepRecord)][: len(listed)]
    row: dict[str, Any] = json.loads(run.metrics.read_text())
    of_several_processes = [name for name in listed if name.startswith(("rank_time", "slowest"))]
    assert len(of_several_processes) == 4
    of_compiling_steps = [name for name in listed if name.startswith("compil")]
    assert len(of_compiling_steps) == 3
    # Every other value is known: a validation, and the peak of the CPU.
    of_tasks = [name for name in listed if name.startswith("task")]
    assert len(of_tasks) == 2
    others = {*of_several_processes, *of_compiling_steps, *of_tasks, "valid_sets"}
    assert list(row) == [name for name in listed if name not in others]


def test_every_figure_of_the_summary_is_documented(run: RunDirectory) -> None:
    """The page lists the keys of `summary.json`, in their order, and the phases of a start."""
    summary: dict[str, Any] = json.loads((run.path / "summary.json").read_text())
    assert keys("## `summary.json`") == list(summary)
    for phase in summary["startup_seconds"]:
        assert f"`{phase}`" in page("run-directory.md")


def test_pictures() -> None:
    """Each is on a page, small, and taken by `docs/take_pictures.py`."""
    pages = "\n".join(one.read_text(encoding="utf-8") for one in ROOT.glob("docs/*/*.md"))
    script = (ROOT / "docs/take_pictures.py").read_text(encoding="utf-8")
    pictures = sorted((ROOT / "docs/pictures").iterdir())
    assert {one.name for one in pictures} == set(re.findall(r'FOLDER / "([^"]+)"', script))
    for one in pictures:
        assert f"](../pictures/{one.name})" in pages
        assert one.stat().st_size < 150_000


def test_systems_have_examples() -> None:
    """Each fork in README's table has an example, and a command that CI runs.

    CI runs `examples/run_all.py`, which runs the scripts beside it.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Coming from a fork of Megatron\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    run = load("examples/run_all.py").commands((1,))
    (environments,) = re.findall(r"\nenv_list = (.*)\n", (ROOT / "tox.ini").read_text("utf-8"))
    assert "examples" in environments.split(", "), "CI runs the default environments"
    assert rows[0][2].strip().startswith("command that CI runs")
    assert len(rows) == 2 + 5
    for fork, what, commands in rows[2:]:
        linked = re.findall(r"\]\((examples/[^)#]*)\)", what)
        assert linked, f"{fork.strip()}: no example"
        assert [path for path in linked if not (ROOT / path).is_file()] == []
        scripts = re.fullmatch(r" `examples/[\w.]+\.sh`(?:, `examples/[\w.]+\.sh`)* ", commands)
        assert scripts, f"{fork.strip()}: `{commands.strip()}` is no command"
        for path in re.findall(r"`(\S+)`", commands):
            assert Path(path).name in run, f"examples/run_all.py does not run {path}"
            assert (ROOT / path).is_file(), path
