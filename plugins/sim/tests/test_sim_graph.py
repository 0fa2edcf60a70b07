"""Work that is recorded and played again: on the device itself, and as steps of a run."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lmcore.contract.torch_versions import ACCELERATOR_GRAPH

pytestmark = pytest.mark.skipif(not ACCELERATOR_GRAPH, reason=ACCELERATOR_GRAPH.absence)

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
WATCHED = Path(__file__).parent / "watched_run.py"

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2"
    " --num-threads 1 --sample-tokens 0 --log-interval 1 --progress plain --eval-iters 1"
    " --hidden-dropout 0.1 --no-tensorboard --device sim"
)
DROPOUT = "--attention-dropout 0.1"
LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --group-query-attention --num-query-groups 1 --untie-embeddings-and-output-weights"
)
ONE = "--nproc-per-node 1 --global-batch-size 4"


@contextmanager
def capturing(graph: Any) -> Iterator[None]:
    with torch.Stream("sim"):
        graph.capture_begin()
        yield
        graph.capture_end()


def test_a_capture_changes_nothing(sim: ModuleType) -> None:
    """Captured ops are not executed: not in place, not on new tensors, and nothing is drawn."""
    total, x = torch.ones(3, device="sim"), torch.full((3,), 2.0, device="sim")
    state = sim.get_rng_state()
    graph = torch.accelerator.Graph()
    with capturing(graph):
        made = torch.nn.functional.dropout(x, 0.5)
        total.add_(made)
        torch._foreach_mul_([total, x], 3.0)
    assert total.tolist() == [1, 1, 1]
    assert x.tolist() == [2, 2, 2]
    assert made.isnan().all()
    assert torch.equal(sim.get_rng_state(), state)


def test_a_graph_does_what_autograd_did(sim: ModuleType) -> None:
    """A replay on new numbers gives the losses and gradients of the ops themselves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Dropout(0.3)),
        torch.nn.Linear(8, 5),
    ).to("sim")
    x, y = torch.zeros(6, 8, device="sim"), torch.zeros(6, dtype=torch.long, device="sim")

    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def with_numbers(seed: int, call: Callable[[], Any]) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(6, 8, generator=random))
        y.copy_(torch.randint(5, (6,), generator=random))
        torch._foreach_zero_([parameter.grad for parameter in model.parameters()])
        sim.manual_seed(seed)
        out = call()
        loss = out if out is not None else recorded
        return [loss.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]

    step()
    graph = torch.accelerator.Graph()
    with capturing(graph):
        recorded = step()
    gc.collect()  # what is played must not need what the model made on its way
    for seed in (1, 2, 1):
        played = with_numbers(seed, graph.replay)
        done = with_numbers(seed, step)
        assert all(torch.equal(a, b) for a, b in zip(played, done, strict=True))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.accelerator.synchronize(),
        lambda x: torch.accelerator.current_stream().query(),
    ],
    ids=["item", "cpu", "nonzero", "copy", "synchronize", "query"],
)
def test_waiting_is_refused(sim: ModuleType, waits: Callable[[torch.Tensor], object]) -> None:
    """A call that has the host wait raises and spoils the capture; the device is as it was."""
    x = torch.ones(3, device="sim")
    graph = torch.accelerator.Graph()
    with torch.Stream("sim"):
        graph.capture_begin()
        x.mul_(2)
        with pytest.raises(RuntimeError, match="not permitted while the stream is captured"):
            waits(x)
        with pytest.raises(RuntimeError, match="the capture is of no use: "):
            graph.capture_end()
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="nothing to play"):
        graph.replay()
    with capturing(graph):  # it can be used again
        x.add_(1)
    graph.replay()
    graph.replay()
    assert x.tolist() == [3, 3, 3]


def test_other_streams_are_not_recorded(sim: ModuleType) -> None:
    """Work on another stream is done meanwhile, and late copies from pinned memory are recorded."""
    x, y = torch.ones(3, device="sim"), torch.ones(3, device="sim")
    host = torch.full((3,), 5.0).pin_memory()
    graph, side = torch.accelerator.Graph(), torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with capturing(graph):
        x.copy_(host, non_blocking=True)
        with side:
            y.add_(1)
    torch.accelerator.current_stream().wait_stream(side)
    assert (x.tolist(), y.tolist()) == ([1, 1, 1], [2, 2, 2])
    host.fill_(6)
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([6, 6, 6], [2, 2, 2])


def test_order_is_kept(sim: ModuleType) -> None:
    """A graph that captures cannot begin again, and one that holds work is reset first."""
    x = torch.ones(3, device="sim")
    graph, other = torch.accelerator.Graph(), torch.accelerator.Graph()
    with torch.Stream("sim"):
        graph.capture_begin()
        x.add_(1)
        with pytest.raises(RuntimeError, match="captured already"):
            other.capture_begin()
        graph.capture_end()
        with pytest.raises(RuntimeError, match="holds something already"):
            graph.capture_begin()
    graph.reset()
    with pytest.raises(RuntimeError, match="nothing to play"):
        graph.replay()


@pytest.fixture
def train(run_python: RunPython, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what trains a tiny model on the device, into the folder of that name."""

    def go(name: str, flags: str, **env: str) -> subprocess.CompletedProcess[str]:
        arguments = f"train {TINY} {flags}".split()
        return run_python(
            "-m", "lmcore.cli.main", *arguments, "--save", str(tmp_path / name), **env
        )

    return go


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """Return the results of steps: loss, norm, scale and, if there was one, validation."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "loss_scale", "validation_loss")
    return [tuple(json.loads(line).get(name) for name in names) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"{ONE} {DROPOUT} --eval-interval 3",
        f"{ONE} {LLAMA} --reset-attention-mask --reset-position-ids --optimizer schedulefree",
        f"{ONE} --precision fp16 --initial-loss-scale 4294967296 --hysteresis 1",
        f"--nproc-per-node 2 {DROPOUT} --global-batch-size 8 --precision bf16",
    ],
    ids=["dropout", "documents", "overflow", "copies"],
)
def test_a_recorded_run_is_the_same_run(train: Any, tmp_path: Path, flags: str) -> None:
    """Losses, norms and validations equal a run without capture, bit for bit."""
    for name, more in {"plain": "", "graph": "--step-graph"}.items():
        done = train(name, f"--train-iters 6 {flags} {more}")
        # From 2^32 on every step is skipped, while the loss scale falls.
        assert done.returncode == 0, done.stderr
        assert ("no step updated the weights" in done.stderr) == ("4294967296" in flags)
    assert "graph     forward and backward" in done.stderr
    found = rows(tmp_path / "graph")
    assert len(found) == 6
    assert found == rows(tmp_path / "plain")


@pytest.mark.slow
def test_continued(train: Any, tmp_path: Path) -> None:
    """A run that is continued with a graph is the run that was not interrupted."""
    assert train("whole", f"{ONE} --train-iters 8 --step-graph").returncode == 0
    stopped = train("parts", f"{ONE} --train-iters 8 --step-graph --exit-interval 5")
    assert stopped.returncode == 0, stopped.stderr
    load = f"--load {tmp_path / 'parts'}"
    done = train("parts", f"{ONE} --train-iters 8 --step-graph {load}")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_nothing_is_waited_for(run_python: RunPython, tmp_path: Path) -> None:
    """Steps that record, and steps that play, have the host read nothing of the device.

    The one wait is that before the record begins.
    """
    arguments = f"{TINY} {ONE} --train-iters 6 --step-graph".split()
    done = run_python(str(WATCHED), *arguments, "--save", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "watched 6"


@pytest.mark.slow
def test_what_cannot_be_recorded(run_python: RunPython, tmp_path: Path) -> None:
    """An op that waits in the middle of a pass ends the run with its reason and the flag."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys\n"
        "from lmcore.families.gpt.model import GPT\n"
        "real = GPT.loss_of\n"
        "def loss_of(self, *args):\n"
        "    loss = real(self, *args)\n"
        "    assert float(loss) > 0\n"
        "    return loss\n"
        "GPT.loss_of = loss_of\n"
        "from lmcore.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = f"train {TINY} {ONE} --train-iters 6 --step-graph --save {tmp_path / 'run'}".split()
    done = run_python(str(broken), *arguments)
    assert done.returncode == 2
    assert "cannot be captured" in done.stderr
    assert "an op has the host wait for its result" in done.stderr
    assert "leave `--step-graph` out" in done.stderr
    assert "Traceback" not in done.stderr
