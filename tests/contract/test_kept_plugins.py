"""Plugins for earlier versions of the contract, as `lmcore plugin new` wrote them then: they run.

`kept_plugins/VERSION` has their files, which are never changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from suite import warm

from lmcore.contract import API_VERSION

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("kept_plugins")
CONTRACTS = ROOT / "plugins/conformance/src/lmcore_conformance/contract/versions"
VERSIONS = sorted(folder.name for folder in KEPT.iterdir())
SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --train-iters 3"
    " --eval-iters 0 --sample-tokens 0 --progress none --no-tensorboard --num-threads 1"
)

Lmcore = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=VERSIONS)
def lmcore(request: pytest.FixtureRequest, tmp_path: Path) -> Lmcore:
    """Runs lmcore where the plugins for one version are installed."""
    site = tmp_path / "site"
    for package in (KEPT / request.param).iterdir():
        (site / package.name).mkdir(parents=True)
        for file in package.iterdir():
            (site / package.name / file.stem).write_bytes(file.read_bytes())
        record = site / f"{package.name}-1.dist-info"
        record.mkdir()
        name = package.name.removeprefix("lmcore_")
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: lmcore-{name}\nVersion: 1\n"
        )
        (record / "entry_points.txt").write_text(
            f"[lmcore.plugins]\n{name} = {package.name}.plugin\n"
        )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE_")}
    paths = [str(site), *filter(None, [kept.get("PYTHONPATH")])]
    env = kept | {"PYTHONPATH": os.pathsep.join(paths), "LMCORE_PLUGINS": "hostchip,tools"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return warm.run(
            [sys.executable, "-m", "lmcore.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=tmp_path,
            env=env,
        )

    return run


def test_each_earlier_version_has_its_plugins() -> None:
    """A version that has a successor keeps plugins here, which promise this version first."""
    versions = {file.stem for file in CONTRACTS.glob("*.json")} - {API_VERSION}
    assert set(VERSIONS) == versions
    for version in VERSIONS:
        for file in (KEPT / version).glob("*/plugin.py.kept"):
            assert re.search(rf'api=">={re.escape(version)},<2"', file.read_text("utf-8"))


@pytest.mark.slow
def test_a_plugin_for_an_earlier_version_runs(lmcore: Lmcore, tmp_path: Path) -> None:
    """It is usable, trains, adds its options and files, and generates."""
    listed = json.loads(lmcore("plugins", "--json").stdout)
    for one in listed["plugins"]:
        assert one["state"] == ("usable" if one["name"] in {"cpu", "hostchip", "tools"} else "off")
    flags = f"--device hostchip --tools-note kept --save {tmp_path / 'run'} {SMALL}"
    done = lmcore("train", *flags.split())
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "run/environment.json").read_text("utf-8"))
    assert environment["selection"]["plugin"] == "hostchip"
    note = json.loads((tmp_path / "run/tools.json").read_text("utf-8"))
    assert note == {"note": "kept", "status": "completed", "iteration": 3}
    flags = f"--device hostchip --load {tmp_path / 'run'} --prompt a --tokens 4"
    done = lmcore("generate", *flags.split())
    assert done.returncode == 0, done.stderr
