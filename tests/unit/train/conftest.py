"""A tiny model, its data and a runtime on the CPU, for the modules of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.config.load import load_config
from lmcore.config.plan import RunPlan
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.data.blend.check import inspect_sources
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import build_tokenizer
from lmcore.parallel.parallel_model import parallelize
from lmcore.parallel.random_states import seed_everything
from lmcore.plugin import discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.datasets import RunDatasets, build_datasets
from lmcore.train.resume.point import find_resume_point
from lmcore.train.state import TrainState

TINY = {
    "--num-layers": "2",
    "--hidden-size": "16",
    "--num-attention-heads": "2",
    "--seq-length": "16",
    "--micro-batch-size": "4",
    "--train-iters": "8",
    "--eval-iters": "0",
    "--make-vocab-size-divisible-by": "8",
    "--num-threads": "1",
}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Bytes."""
    return build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)


@pytest.fixture(scope="session")
def data_prefix(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """Forty thousand characters of the bundled text, prepared."""
    folder = tmp_path_factory.mktemp("data")
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    (folder / "text.txt").write_text(text[:40_000], "utf-8")
    prepare_text(folder / "text.txt", tokenizer, folder / "text")
    return str(folder / "text_text_document")


@pytest.fixture(scope="session")
def make_plan(data_prefix: str) -> Callable[[str], RunPlan]:
    """Resolves flags on top of the tiny model's."""

    def make(flags: str = "") -> RunPlan:
        words = flags.split()
        tiny = {name: value for name, value in TINY.items() if name not in words}
        if "--train-samples" in words:
            del tiny["--train-iters"]
        argv = [word for pair in tiny.items() for word in pair]
        argv += ["--data-path", data_prefix, *words]
        loaded = load_config(argv)
        sources, problems = inspect_sources(loaded.sources[0])
        return resolve(
            validate(loaded, further=problems),
            tokenizer=TokenizerIdentity(vocab_size=257),
            sources=sources,
            resume=find_resume_point(loaded.config.checkpoint),
        )

    return make


@pytest.fixture(scope="session")
def runtime(make_plan: Callable[[str], RunPlan]) -> Iterator[Runtime]:
    """The CPU in fp32, one thread."""
    plugins = discover(env={})
    selection = select(plugins, requested="cpu", env={})
    with start_runtime(make_plan("").config, plugins, selection, RankInfo()) as runtime:
        yield runtime


@pytest.fixture
def make_state(runtime: Runtime) -> Callable[[RunPlan], TrainState]:
    """Makes the state of a run that has not begun."""

    def make(plan: RunPlan) -> TrainState:
        seed_everything(plan.config.training.seed, runtime)
        shape = plan.shape
        parallel = parallelize(shape, plan.layout, runtime)
        parallel.initialize(plan.config.training.seed)
        return TrainState.create(parallel, plan, runtime)

    return make


@pytest.fixture
def make_datasets(tokenizer: Any, tmp_path: Path) -> Callable[[RunPlan], RunDatasets]:
    """Opens the data of a plan."""
    return lambda plan: build_datasets(plan, tokenizer, tmp_path)


@pytest.fixture
def weights() -> Callable[[TrainState], dict[str, torch.Tensor]]:
    """Copies weights and optimizer state."""
    return lambda state: {name: tensor.clone() for name, tensor in state.tensors().items()}


@pytest.fixture(autouse=True)
def _no_stray_threads() -> Iterator[None]:
    """A loader's thread ends with its loop."""
    import threading

    yield
    end = time.monotonic() + 2
    while any(one.name == "lmcore-data" for one in threading.enumerate()):
        assert time.monotonic() < end, "a loader's thread is left"
        time.sleep(0.01)
