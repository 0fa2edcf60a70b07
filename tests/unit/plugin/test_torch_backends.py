"""A package whose backend torch cannot load: every command names it, and blames no plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_backend import HINT, WHAT, WHY, install_broken_backend
from model_states import GPT2, RandomState

from lmcore.conversion.native.write import write_lmcore
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.plugin.torch_backends import backend_error, installed_backends
from lmcore.runtime.torch_import import broken_backend


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """Installs a package whose backend raises; returns the environment of a process with it."""
    return install_broken_backend(tmp_path)


def lmcore(argv: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a new interpreter, which imports torch itself."""
    command = [sys.executable, "-m", "lmcore.cli.main", *argv.split()]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run(broken: dict[str, str], tmp_path: Path) -> None:
    """Training ends with the package, its version, the cause and the switch: no traceback."""
    done = lmcore("train --device cpu --train-iters 1 --save run", broken, tmp_path)
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("error: ") :]
    assert message.startswith(f"error: {WHAT}\nwhy: {WHY}\n\nhint: {HINT}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "generate --device cpu --load run --prompt a --tokens 2",
        "checkpoint convert run out --to huggingface",
    ],
)
def test_commands_that_read_a_checkpoint(
    broken: dict[str, str], tmp_path: Path, command: str
) -> None:
    """Generation and every other command that loads torch for a model has the same message."""
    write_lmcore(RandomState(GPT2), tmp_path / "run", ByteTokenizer())
    done = lmcore(command, broken, tmp_path)
    assert done.returncode == 1, done.stdout
    message = done.stderr[done.stderr.index("error: ") :]
    assert message.startswith(f"error: {WHAT}\nwhy: {WHY}\n\nhint: {HINT}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_program(broken: dict[str, str], tmp_path: Path) -> None:
    """`lmcore.start` gives the same message."""
    program = "import lmcore\nrt = lmcore.start(device='cpu')\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=broken,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {WHAT}\n")
    assert "Traceback" not in done.stderr


def test_plugins_and_doctor(broken: dict[str, str], tmp_path: Path) -> None:
    """`lmcore plugins` shows the problem, and `doctor` checks no plugin without torch."""
    found = json.loads(lmcore("plugins --json", broken, tmp_path).stdout)
    assert found["torch_error"]["what"] == WHAT
    assert found["torch_error"]["why"] == WHY
    done = lmcore("doctor --json", broken, tmp_path)
    assert done.returncode == 1
    groups = {group["name"]: group["checks"] for group in json.loads(done.stdout)["groups"]}
    (failed,) = (
        (name, check["name"], check["detail"])
        for name, checks in groups.items()
        for check in checks
        if check["status"] == "failed"
    )
    assert failed == ("lmcore", "torch backends", f"{WHAT}: {WHY}")


def test_without_backends(broken: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's switch leaves nothing to load, nor does an environment without such packages."""
    monkeypatch.syspath_prepend(broken["PYTHONPATH"].split(os.pathsep)[0])
    assert installed_backends({}) == ["acme (acme-ext 1.2)"]
    assert installed_backends({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == []
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert broken_backend() is None


def test_errors_of_torch() -> None:
    """Only the error of a backend is explained, wherever it is in the chain of causes."""
    assert backend_error(RuntimeError("out of memory")) is None
    assert backend_error(ImportError("no torch")) is None
    failed = RuntimeError(
        "Failed to load the backend extension: x.y. You can disable extension auto-loading with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )
    failed.__cause__ = OSError("no\ndriver")
    wrapped = ValueError("cannot probe")
    wrapped.__context__ = failed
    explained = backend_error(wrapped)
    assert explained is not None
    assert (explained.what, explained.why) == (
        "torch cannot load the backend `x.y`",
        "OSError: no driver",
    )


def test_two_backends_in_one_place_of_torch(tmp_path: Path) -> None:
    """The second one is named, and how to go without both; then training works."""
    for name in ("first", "second"):
        (tmp_path / f"torch_{name}.py").write_text(
            "def autoload():\n"
            "    import torch\n"
            f"    torch.utils.rename_privateuse1_backend('{name}')\n",
            "utf-8",
        )
        info = tmp_path / f"torch_{name}-1.2.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: torch-{name}\nVersion: 1.2\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        point = f"[torch.backends]\n{name} = torch_{name}:autoload\n"
        (info / "entry_points.txt").write_text(point, "utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    command = "train --device cpu --train-iters 1 --num-layers 1 --hidden-size 16 --seq-length 16"
    command += " --num-attention-heads 2 --eval-iters 0 --sample-tokens 0 --save run"
    done = lmcore(command, env, tmp_path)
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("error: ") :]
    expected = (
        "error: torch cannot load the backend `{0}` of `torch-{0}` 1.2 beside another one\n"
        "why: torch has one place for a device type that another package brings; RuntimeError: "
    )
    # Torch loads them in the order of the files in a directory.
    assert message.startswith((expected.format("first"), expected.format("second")))
    assert "hint: set TORCH_DEVICE_BACKEND_AUTOLOAD=0: the plugin of the chosen device" in message
    done = lmcore(command, {**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, tmp_path)
    assert done.returncode == 0, done.stderr
