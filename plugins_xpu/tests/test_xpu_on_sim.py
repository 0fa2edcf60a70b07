"""The plugin's own code on the simulated device: whole commands, in separate processes.

The plugin of `on_sim/` calls the hooks of lmcore-xpu; only facts of the machine, `torch.xpu`, XCCL
and oneCCL's bindings are replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from suite import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIM = ROOT / "plugins" / "sim" / "src"

NAME = "Intel(R) Data Center GPU Max 1100"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --num-threads 1"
    " --sample-tokens 0 --eval-iters 0 --log-interval 1 --progress plain --micro-batch-size 4"
)


def folder_of(package: str, source: Path) -> Path:
    """Return the folder of an installed package, or of its source."""
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found else None
    return Path(folders[0]) if folders else source / package


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The environment of a process in which the plugin is the only one beside the CPU's.

    Packages are linked without their metadata, so that no plugin but the tests' plugin is found.
    """
    site = tmp_path_factory.mktemp("site")
    sim = folder_of("lmcore_sim", SIM)
    own = folder_of("lmcore_xpu", HERE.parent / "src")
    (site / "lmcore_sim").symlink_to(sim)
    (site / "lmcore_xpu").symlink_to(own)
    check = "from lmcore_sim.probe import library_problem; print(library_problem() or '')"
    before = [str(site), str(HERE / "on_sim"), str(HERE / "fakes" / "torch-xpu")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE_")}
    paths = before + ([kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [])
    env = kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, env=env
    )
    if done.returncode or done.stdout.strip():
        pytest.skip(f"no simulated device: {(done.stdout or done.stderr).strip()[-300:]}")
    record = site / "lmcore_xpu_on_sim-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcore-xpu-on-sim\nVersion: 1\n")
    points = "[lmcore.plugins]\nxpu-on-sim = lmcore_xpu_on_sim.plugin\n"
    points += "[torch.backends]\nxpu_on_sim = lmcore_xpu_on_sim.adapter:stand_in\n"
    (record / "entry_points.txt").write_text(points)
    return env | {"LMCORE_PLUGINS": "xpu-on-sim"}


@pytest.fixture
def lmcore(environment, tmp_path):
    """Function that runs a command in a separate process, and returns its output."""

    def run(*arguments: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = warm.run(
            [sys.executable, "-m", "lmcore.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=tmp_path,
            env=environment | env,
        )
        assert done.returncode == status, done.stderr + done.stdout
        return done

    return run


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_it_is_the_plugin_that_is_found(lmcore):
    """The probe of lmcore-xpu speaks, and its device is chosen."""
    found = json.loads(lmcore("plugins", "--json").stdout)
    plugin = next(plugin for plugin in found["plugins"] if plugin["name"] == "xpu-on-sim")
    assert plugin["state"] == "usable", plugin
    assert plugin["selected"]
    assert "0000:04:00.0" in json.dumps(plugin)


IMPORTED = """
import torch
assert torch.xpu.device_count() == 2
x, grad = torch.randn(2, 2**14 + 1, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
rows = {}
for device, dtype in (("xpu", torch.bfloat16), ("cpu", torch.float64)):
    given = [torch.ones(24, dtype=dtype, device=device).requires_grad_() for _ in "wb"]
    out = torch.nn.functional.layer_norm(x.to(given[0]), (24,), *given)
    found = torch.autograd.grad(out, given, grad.to(out))
    rows[device] = [one.cpu().double() for one in found]
for found, right in zip(rows["xpu"], rows["cpu"], strict=True):
    print((found - right).abs().max().item() / right.abs().max().item())
"""


def test_torch_itself_loads_the_stand_in(environment):
    """No hook is called: so the hooks find torch complete.  It sums gradients of gains wide."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 0.01


@pytest.mark.slow
def test_the_doctor_tries_the_device(lmcore):
    """Every check of the plugin, and the core's products and sum on two devices, end well."""
    found = json.loads(lmcore("doctor", "--json", LMCORE_DEVICE="sim").stdout)
    (checks,) = (group["checks"] for group in found["groups"] if "xpu-on-sim" in group["name"])
    results = {check["name"]: (check["status"], check["detail"]) for check in checks}
    assert "failed" not in {status for status, _ in results.values()}, results
    assert results["device works"] == ("ok", f"{NAME}: bfloat16, float16, float32, float64")
    assert results["all-reduce"][1].startswith("2 processes over `simccl`: sum right")


@pytest.mark.slow
def test_two_processes_go_on_as_one(lmcore, tmp_path):
    """bf16 by default; with ZeRO-2 two devices continue what one began, with its losses.

    Reductions sum and divide, since XCCL's do not average, and kernels are the plugin's.
    """
    batch = f"train --device sim {TINY} --global-batch-size 8 --train-iters 4"
    first, second = tmp_path / "one", tmp_path / "two"
    lmcore(*f"{batch} --nproc-per-node 1 --save-interval 2 --save {first}".split())
    begun = first / "checkpoints" / "iter_0000002"
    more = f"--zero-stage 2 --nproc-per-node 2 --load {begun} --save {second}"
    lmcore(*f"{batch} {more}".split())
    expected = losses(first)
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    assert losses(second) == pytest.approx(expected[2:], rel=1e-3)
    assert (second / "checkpoints" / "iter_0000004").is_dir()
    environment = json.loads((second / "environment.json").read_text())
    assert environment["selection"]["plugin"] == "xpu-on-sim"
    assert environment["device"]["name"] == NAME
    assert environment["device"]["facts"]["torch_xpu"] == "20250302"
    assert environment["precision"]["name"] == "bf16"
    assert environment["comm_backend"]["name"] == "simccl"
    kernels = json.loads((second / "kernels.json").read_text())
    chosen = {op["op"]: op["chosen"] for op in kernels["ops"]}
    assert chosen["attention"] == "sdpa"


@pytest.fixture(scope="session")
def with_bindings(environment, put_bindings, tmp_path_factory):
    """Environment with oneCCL's bindings for this torch, and oneCCL."""
    site = tmp_path_factory.mktemp("bindings")
    number = ".".join(torch.__version__.split(".")[:2])
    oneccl = put_bindings(site, f"{number}.0+xpu")
    return oneccl | {"PYTHONPATH": os.pathsep.join([str(site), environment["PYTHONPATH"]])}


def groups(folder: Path) -> list[dict]:
    """Return the facts that the bindings recorded of each process group."""
    files = [file.read_text().splitlines() for file in folder.iterdir()]
    return [json.loads(line) for lines in files for line in lines]


@pytest.mark.slow
def test_ccl_by_name(lmcore, with_bindings, tmp_path):
    """ZeRO-1 over `ccl`, saved and continued with tensor parallelism, has the losses of `xccl`.

    The bindings find the variables of the rank set, and change none.
    """
    record = tmp_path / "groups"
    record.mkdir()
    with_record = {**with_bindings, "STAND_IN_RECORD": str(record)}
    batch = f"train --device sim {TINY} --global-batch-size 8 --train-iters 4 --nproc-per-node 2"
    batch += " --make-vocab-size-divisible-by 256"  # the same logits with tensor parallelism
    first, second, xccl = tmp_path / "one", tmp_path / "two", tmp_path / "xccl"
    lmcore(*f"{batch} --zero-stage 1 --save {xccl}".split(), **with_bindings)
    ccl = f"{batch} --distributed-backend ccl"
    lmcore(*f"{ccl} --zero-stage 1 --save-interval 2 --save {first}".split(), **with_record)
    begun = first / "checkpoints" / "iter_0000002"
    more = f"--tensor-model-parallel-size 2 --load {begun} --save {second}"
    lmcore(*f"{ccl} {more}".split(), **with_record)
    assert json.loads((xccl / "environment.json").read_text())["comm_backend"]["name"] == "simccl"
    assert losses(first) == losses(xccl)
    assert losses(second) == pytest.approx(losses(xccl)[2:], rel=1e-3)
    backend = json.loads((second / "environment.json").read_text())["comm_backend"]
    assert backend["name"] == "ccl"
    found = groups(record)
    assert {group["rank"] for group in found} == {0, 1}
    assert not any(group["changed"] for group in found), found
    for group in found:
        assert group["env"]["CCL_PROCESS_LAUNCHER"] == "none"
        assert group["env"]["CCL_ATL_TRANSPORT"] == "ofi"
        assert group["env"]["CCL_LOCAL_SIZE"] == "2"


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    ["", "--zero-stage 3", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"],
)
def test_ccl_has_the_losses_of_xccl(lmcore, with_bindings, layout, tmp_path):
    """DDP, sharding of parameters, tensor and pipeline parallelism over `ccl`."""
    train = f"train --device sim {TINY} --global-batch-size 8 --train-iters 3 --nproc-per-node 2"
    found = {}
    for backend in ("xccl", "ccl"):
        # Under its own name the stand-in of `xccl`, the default, is `simccl`.
        asked = "--distributed-backend ccl" if backend == "ccl" else ""
        lmcore(*f"{train} {layout} {asked} --save {tmp_path / backend}".split(), **with_bindings)
        record = json.loads((tmp_path / backend / "environment.json").read_text())
        assert record["comm_backend"]["name"] == ("ccl" if backend == "ccl" else "simccl")
        found[backend] = losses(tmp_path / backend)
    assert len(found["ccl"]) == 3
    assert found["ccl"] == found["xccl"]


def conformance(env: dict[str, str], folder: Path, *options: str) -> dict:
    """Return the report of the conformance suite, whose checks must not fail."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not any(point.name == "lmcore_conformance" for point in entry_points(group="pytest11")):
        command += ["-p", "lmcore_conformance.pytest_plugin"]
    command += ["--pyargs", "lmcore_conformance", "--accelerator", "xpu-on-sim", *options]
    command += ["--conformance-json", str(report), "--patience", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return json.loads(report.read_text())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_conformance(environment, tmp_path):
    """All levels are reached, and what is not claimed is what the reference says."""
    page = (ROOT / "docs" / "reference" / "xpu.md").read_text(encoding="utf-8")
    line = r"^- torch (\d+\.\d+): (\d+) of (\d+) checks; gaps: (.*)$"
    rows = re.findall(line, page, re.MULTILINE)
    documented = {release: (int(passed), int(total), gaps) for release, passed, total, gaps in rows}
    # By AMX, oneDNN of torch 2.13 and 2.15 lets a NaN reach another row of a product in bfloat16.
    found = conformance(environment | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, tmp_path)
    verdicts = {level["level"]: level["verdict"] for level in found["levels"]}
    assert set(verdicts.values()) == {"reached"}, verdicts
    passed, total = (sum(level[key] for level in found["levels"]) for key in ("passed", "checks"))
    release = ".".join(torch.__version__.split(".")[:2])
    left = [check["id"] for check in found["checks"] if check["status"] == "declared gap"]
    gaps = ", ".join(f"`{name}`" for name in sorted(left))
    assert documented[release] == (passed, total, gaps)


@pytest.mark.full
def test_conformance_of_ccl(environment, with_bindings, tmp_path):
    """Level 4 passes over `ccl`, which a torch without XCCL chooses by itself."""
    env = environment | with_bindings | {"ON_SIM_WITHOUT_XCCL": "1"}
    found = conformance(env, tmp_path, "--levels", "L4")
    (level,) = (level for level in found["levels"] if level["level"] == "L4")
    assert (level["verdict"], level["failed"]) == ("reached", 0)
    start = next(check for check in found["checks"] if check["id"] == "distributed.start")
    assert start["detail"] == "2 processes over `ccl`"


@pytest.mark.full
def test_ccl_that_cannot_be_used_is_refused(lmcore, with_bindings, tmp_path):
    """The error names the backend and the variable; the default is used without the flag."""
    train = f"train --device sim {TINY} --global-batch-size 8 --train-iters 1 --nproc-per-node 2"
    refused = lmcore(
        *f"{train} --distributed-backend ccl".split(),
        status=2,
        **with_bindings | {"CCL_ROOT": str(tmp_path)},
    )
    assert "`--distributed-backend ccl` cannot be used on this device" in refused.stderr
    assert f"`CCL_ROOT={tmp_path}` has no `lib/libccl.so.1`" in refused.stderr
    assert "hint: leave it out: `simccl` is used then" in refused.stderr
    contradiction = with_bindings | {"CCL_ATL_TRANSPORT": "mpi"}
    refused = lmcore(*train.split(), status=2, **contradiction)
    assert "processes on this device cannot exchange tensors" in refused.stderr
    assert refused.stderr.count("`CCL_ATL_TRANSPORT=mpi`, and no MPI launcher") >= 2
