"""Jobs of `lmcore launch` with several nodes: pods of Kubernetes, and hosts by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcore.cli.main import main

MODEL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
)
SECONDS = 120


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with `lmcore` of this tree in `bin`, and a secret."""
    monkeypatch.chdir(tmp_path)
    write_program("lmcore", f'exec {shlex.quote(sys.executable)} -m lmcore.cli.main "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LMCORE_SECRET", "0123456789abcdef")
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    return tmp_path


def write_program(name: str, text: str) -> None:
    """Write a shell script into `bin`."""
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)


def steps(run: str) -> list[int]:
    """Return the steps that a run has recorded."""
    path = Path(run, "metrics.jsonl")
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines() if '"loss"' in line]


def start_pods(manifest: dict[str, Any], port: int) -> list[subprocess.Popen[str]]:
    """Start the command of each pod here, with the variables that it would have."""
    spec, pods = manifest["spec"]["pytorchReplicaSpecs"], []
    for rank, replica in enumerate(("Master", "Worker")):
        container = spec[replica]["template"]["spec"]["containers"][0]
        env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": "4", "RANK": str(rank), "PET_NODE_RANK": str(rank)}
        words = [*container["command"], container["args"][0].replace("$$", "$")]
        log = Path(f"{replica}.log").open("a", encoding="utf-8")  # noqa: SIM115  # of the process
        with log:
            pods.append(
                subprocess.Popen(
                    words, env={**os.environ, **env}, stdout=log, stderr=log, text=True
                )
            )
    return pods


@pytest.mark.full
def test_pods_are_restarted_until_the_run_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Two pods of two processes train; a deleted pod saves, both fail, and then continue."""
    flags = ("--nodes", "2", "--processes-per-node", "2", "--container", "image")
    flags += ("--secret", "lmcore", "--restarts", "1")
    words = ("train", *MODEL, "--train-iters", "400", "--save", "run")
    assert main(["launch", "k8s", *flags, *words]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pods = start_pods(manifest, port)
    deadline = time.monotonic() + SECONDS
    while len(steps("run")) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    pods[1].send_signal(signal.SIGTERM)
    statuses = [pod.wait(SECONDS) for pod in pods]
    assert statuses == [143, 143], Path("Master.log").read_text("utf-8")
    done = len(steps("run"))
    assert 3 <= done < 400
    statuses = [pod.wait(SECONDS) for pod in start_pods(manifest, port)]
    assert statuses == [0, 0], Path("Master.log").read_text("utf-8")
    assert steps("run") == list(range(1, 401))
    assert "world_size: 4" in Path("run/config.yaml").read_text("utf-8")


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Make two network namespaces that reach each other; yield their names by address."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip` (Debian: iproute2)")
    names = [f"lmcore-{os.getpid()}-{number}" for number in range(2)]
    found = {f"10.213.77.{number + 1}": name for number, name in enumerate(names)}
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            first, second = names
            ends = ("eth0", "netns", second)
            ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", *ends)
            for address, name in found.items():
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield found


@pytest.mark.full
def test_hosts_as_network_namespaces(hosts: dict[str, str]) -> None:
    """Processes that a hostfile starts on two hosts find each other and train one run."""
    cases = "\n".join(f"{address}) name={name} ;;" for address, name in hosts.items())
    write_program(
        "ssh",
        f'case "$4" in\n{cases}\nesac\nshift 4\nexec ip netns exec "$name" sh -c "$*"',
    )
    Path("hosts").write_text("".join(f"{address} slots=2\n" for address in hosts), "utf-8")
    flags = ("--hostfile", "hosts", "--interface", "eth0", "--env", "OMP_NUM_THREADS=1")
    words = ("train", *MODEL, "--train-iters", "5", "--save", "run's")
    assert main(["launch", "hostfile", *flags, "--submit", *words]) == 0
    assert steps("run's") == [1, 2, 3, 4, 5]
    assert "world_size: 4" in Path("run's/config.yaml").read_text("utf-8")
    # An error is the script's status, and is shown once on each host.
    assert main(["launch", "hostfile", *flags, "--submit", "run", "absent.py"]) == 2
