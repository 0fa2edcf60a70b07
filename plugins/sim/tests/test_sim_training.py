"""`lmcore train --device sim`: the CPU's losses, exact resume, policies in force, faults met."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite import warm

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
    " --num-threads 1 --sample-tokens 0 --eval-iters 0 --log-interval 1 --progress plain"
)


@pytest.fixture
def train(run_python: RunPython, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what trains a tiny model on a device, into the folder of that name."""

    def go(name: str, device: str, flags: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        many = "" if "--nproc-per-node" in flags else "--nproc-per-node 1"
        micro = "" if "--micro-batch-size" in flags else "--micro-batch-size 4"
        arguments = f"train --device {device} {TINY} {micro} {many} {flags}".split()
        save = str(tmp_path / name)
        return run_python("-m", "lmcore.cli.main", *arguments, "--save", save, **env)

    return go


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def weights(folder: Path, step: int) -> dict[str, Any]:
    import torch

    from lmcore.checkpoint import find_checkpoint, load_checkpoint, read_manifest

    checkpoint = find_checkpoint(folder / f"checkpoints/iter_{step:07d}")
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in read_manifest(checkpoint).tensors.items()
    }
    load_checkpoint(checkpoint, tensors)
    return tensors


@pytest.mark.slow
def test_losses_are_those_of_the_cpu(train: Any, tmp_path: Path) -> None:
    """On the bundled text a run in float32 reaches the CPU's losses to 1e-5."""
    for device in ("cpu", "sim"):
        done = train(device, device, "--train-iters 8")
        assert done.returncode == 0, done.stderr
    expected, found = losses(tmp_path / "cpu"), losses(tmp_path / "sim")
    assert len(expected) == 8
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, abs=1e-5, rel=0)
    environment = json.loads((tmp_path / "sim" / "environment.json").read_text())
    assert "simulated device" in json.dumps(environment)


@pytest.mark.slow
def test_fp16(train: Any, tmp_path: Path) -> None:
    """The losses are the CPU's to half precision; from 2^32 on steps are skipped."""
    flags = "--train-iters 6 --precision fp16"
    for device in ("cpu", "sim"):
        done = train(device, device, f"{flags} --initial-loss-scale 1024")
        assert done.returncode == 0, done.stderr
    expected, found = losses(tmp_path / "cpu"), losses(tmp_path / "sim")
    assert found == pytest.approx(expected, rel=5e-3)
    done = train("skipped", "sim", flags)
    assert done.returncode == 0, done.stderr
    assert "warning: no step updated the weights" in done.stderr
    rows = (tmp_path / "skipped/metrics.jsonl").read_text().splitlines()[:3]
    assert [json.loads(row)["loss_scale"] for row in rows] == [2.0**32, 2.0**31, 2.0**30]


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(train: Any, tmp_path: Path) -> None:
    """Two devices, each with a process, reach the losses of the CPU in one process to 1e-5.

    One process for each device is what `lmcore train` starts by itself.
    """
    batch = "--global-batch-size 8 --train-iters 8"
    single = train("cpu", "cpu", f"{batch} --micro-batch-size 8")
    assert single.returncode == 0, single.stderr
    expected = losses(tmp_path / "cpu")
    for name, flags in {"whole": "--micro-batch-size 4", "parts": "--micro-batch-size 2"}.items():
        done = train(name, "sim", f"{batch} {flags} --nproc-per-node 2")
        assert done.returncode == 0, done.stderr
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5, rel=0)
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert environment["comm_backend"]["name"] == "simccl"
        assert environment["rank"]["world_size"] == 2


@pytest.mark.slow
def test_a_process_for_each_device(run_python: RunPython, tmp_path: Path) -> None:
    """By default `lmcore train` starts as many processes as there are devices."""
    for count in (1, 3):
        save = tmp_path / str(count)
        arguments = f"train --device sim {TINY} --micro-batch-size 2 --train-iters 2 --save {save}"
        done = run_python(
            "-m", "lmcore.cli.main", *arguments.split(), LMCORE_SIM_DEVICES=str(count)
        )
        assert done.returncode == 0, done.stderr
        environment = json.loads((save / "environment.json").read_text())
        assert environment["rank"]["world_size"] == count


@pytest.mark.slow
def test_a_continued_run_is_the_same_run(train: Any, tmp_path: Path) -> None:
    """Stopped and continued, with dropout and recomputation, every weight is equal bit for bit."""
    import torch

    flags = "--hidden-dropout 0.1 --recompute full"
    assert train("whole", "sim", f"{flags} --train-iters 6").returncode == 0
    first = train("parts", "sim", f"{flags} --train-iters 6 --exit-interval 3")
    assert first.returncode == 0, first.stderr
    more = train("parts", "sim", f"{flags} --train-iters 6 --load {tmp_path / 'parts'}")
    assert more.returncode == 0, more.stderr
    one, second = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert one.keys() == second.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
def test_recomputation_and_offloading_change_nothing(train: Any, tmp_path: Path) -> None:
    """With dropout, each recompute policy gives the losses of none, bit for bit."""
    curves = []
    for policy in ("none", "full", "selective", "offload"):
        done = train(policy, "sim", f"--train-iters 3 --hidden-dropout 0.1 --recompute {policy}")
        assert done.returncode == 0, done.stderr
        curves.append(losses(tmp_path / policy))
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.slow
def test_a_checkpoint_speaks(train: Any, run_python: RunPython, tmp_path: Path) -> None:
    """A model trained in bfloat16 on the device generates there, and the same on the CPU."""
    done = train("run", "sim", "--train-iters 3 --precision bf16")
    assert done.returncode == 0, done.stderr
    texts = []
    for device in ("sim", "cpu"):
        arguments = f"generate --device {device} --load {tmp_path / 'run'} --prompt First --greedy"
        spoken = run_python("-m", "lmcore.cli.main", *arguments.split(), "--tokens", "8")
        assert spoken.returncode == 0, spoken.stderr
        texts.append(spoken.stdout)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, env, expected",
    [
        ("--precision bf16", {"LMCORE_SIM_FAULTS": "no-autocast"}, "`bf16` is not applied"),
        (
            "--precision bf16",
            {"LMCORE_SIM_FAULTS": "autocast-only:mm"},
            "9 of 12 products are in float32, not bfloat16: bmm 6 (2 forward, 4 backward)",
        ),
        ("", {"LMCORE_SIM_FAULTS": "no-rng-restore"}, "does not restore its random numbers"),
        ("--precision bf16", {"LMCORE_SIM_FAULTS": "wrong:mm=1.1"}, "computes wrong products"),
        ("", {"LMCORE_SIM_FAULTS": "lose@400"}, "the sim device is lost"),
        ("", {"LMCORE_SIM_MEMORY": "100KiB"}, "is out of memory"),
        ("--compile", {}, "`--compile` does not work on device `sim`"),
        ("", {"LMCORE_SIM_DEVICES": "0"}, "this device is absent"),
        ("", {"LMCORE_SIM_FAULTS": "nonsense"}, "`nonsense` is not a rule"),
    ],
)
def test_misbehaviour_stops_a_run(
    train: Any, flags: str, env: dict[str, str], expected: str
) -> None:
    """A run on a device with a fault ends with the reason, and not in success."""
    done = train("run", "sim", f"--train-iters 3 {flags}", **env)
    assert done.returncode != 0
    assert expected in done.stderr


@pytest.mark.slow
def test_the_message_of_memory_that_ends_has_flags_that_help(train: Any, tmp_path: Path) -> None:
    """A run out of memory reports the uses of memory; its first remedy trains it."""
    little = {"LMCORE_SIM_MEMORY": "16MiB"}
    done = train("much", "sim", "--train-iters 2 --micro-batch-size 64", **little)
    assert done.returncode == 1
    assert "`sim:0` ran out of memory in the forward pass of step 1" in done.stderr
    assert "activations and the rest: " in done.stderr
    assert "optimizer state: " in done.stderr
    summary = json.loads((tmp_path / "much" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"].startswith("failed: `sim:0` ran out of memory")
    found = re.search(r"`(--micro-batch-size \d+ --global-batch-size \d+)`", done.stderr)
    assert found is not None
    done = train("less", "sim", f"--train-iters 2 {found[1]}", **little)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_hung_device_ends_after_a_signal(environment: dict[str, str], tmp_path: Path) -> None:
    """The error names the device and the call in which the main thread is."""
    flags = f"{TINY} --train-iters 50 --micro-batch-size 4 --nproc-per-node 1 --save {tmp_path}/run"
    process = warm.WarmPopen(
        [
            *(sys.executable, "-m", "lmcore.cli.main", "train", "--device", "sim"),
            *(*flags.split(), "--save-interval", "1", "--stop-timeout-minutes", "0.02"),
        ],
        env=environment | {"LMCORE_SIM_FAULTS": "hang:mm@200"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rows, size = tmp_path / "run/metrics.jsonl", 0
    while not size or rows.stat().st_size > size:
        size = rows.stat().st_size if rows.exists() else 0
        assert process.poll() is None, process.communicate()
        time.sleep(1)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "error: step 7 on `sim:0` did not end within 1.2 seconds of SIGTERM" in err
    assert "_engine_run_backward" in err
    assert (
        err.splitlines()[-1] == f"to continue from step 6: `lmcore train --continue {rows.parent}`"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, what, why",
    [
        ("unhealthy@3", "is not healthy after step 4", "LMCORE_SIM_FAULTS says so"),
        ("lose:mm@140", "failed in step 5", "the sim device is lost"),
    ],
)
def test_a_faulty_device_ends_the_run(
    train: Any, tmp_path: Path, fault: str, what: str, why: str
) -> None:
    """The device is named, and the checkpoint from which the run continues; nothing is saved."""
    flags = "--train-iters 9 --check-device-interval 2 --save-interval 3"
    done = train("run", "sim", flags, LMCORE_SIM_FAULTS=fault)
    assert done.returncode == 1
    assert re.search(
        rf"^error: device `sim:0` \(simulated device\) on host \S+ {what}$",
        done.stderr,
        re.MULTILINE,
    )
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    line = f"to continue from step 3: `lmcore train --continue {tmp_path / 'run'}`"
    assert done.stderr.splitlines()[-1] == line
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("iter_*")] == ["iter_0000003"]
    status = json.loads((tmp_path / "run/summary.json").read_text())["status"]
    assert status.startswith("failed: device `sim:0`")
    again = train("run", "sim", f"{flags} --load {tmp_path / 'run'}")
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_a_faulty_device_of_one_rank_ends_all(train: Any, tmp_path: Path) -> None:
    """The rank with the device is named, and the others end with it."""
    flags = "--train-iters 9 --check-device-interval 2 --save-interval 3 --nproc-per-node 2"
    done = train("run", "sim", flags, LMCORE_SIM_FAULTS="unhealthy@3#1")
    assert done.returncode == 1
    assert "error: device `sim:1` (simulated device) on host" in done.stderr
    assert "from rank 1 of 2" in done.stderr
    assert "to continue from step 3: `lmcore train --continue" in done.stderr.splitlines()[-1]
