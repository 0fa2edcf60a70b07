"""Weights that are cast and packed once, against the model that casts them in every pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch

from lmcore.config.section import AcceleratorSection, Config
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.op_binding import OpBinding
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.generation.text_model import Execution
from lmcore.generation.weights.fix import fix_weights
from lmcore.plugin import discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.runtime import Runtime, start_runtime

REQUESTS = [
    Request(prompt, 6, SamplingOptions(greedy=True), top_logprobs=3)
    for prompt in ([5, 99, 17], [200, 3, 44, 8], [7], [1, 2])
]


@pytest.fixture
def ops() -> OpBinding:
    """The core's own ops: kernels have separate tests."""
    return OpBinding(OpTable(OP_SPECS), "cpu", "float32")


@pytest.fixture(params=["fp32", "bf16", "fp64"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """The CPU in several precisions."""
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=request.param))
    plugins = discover()
    selection = select(plugins, requested="cpu", env={})
    with start_runtime(config, plugins, selection, RankInfo()) as started:
        yield started


def run(model: GPT, execution: Execution) -> list[Continuation]:
    """Continue all requests."""
    batch = ContinuousBatch(model, vocab_size=257, execution=execution)
    made = [batch.add(request) for request in REQUESTS]
    batch.run()
    return made


@pytest.mark.parametrize("rows", [1, 8])
def test_the_probabilities_stay(model: GPT, runtime: Runtime, rows: int) -> None:
    """The log-probabilities equal the policy's, up to its rounding."""
    model.eval()
    runtime.precision.apply(model)
    expected = run(model, Execution(runtime.precision.context))
    fixed = copy.deepcopy(model)
    found = run(fixed, fix_weights(fixed, runtime, rows))
    within = 0.15 if runtime.precision.name == "bf16" else 1e-4
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=within)
        if runtime.precision.name != "bf16":
            assert one.tokens == other.tokens


def test_what_is_cast(model: GPT, runtime: Runtime) -> None:
    """Matrices have the dtype of the products; norms stay, and so does the residual stream."""
    runtime.precision.apply(model)
    kept = model.final_norm.weight.dtype
    fix_weights(model.eval(), runtime, 1)
    compute = getattr(torch, runtime.precision.compute)
    dtypes = {one.weight.dtype for one in model.modules() if isinstance(one, Linear | Embedding)}
    assert dtypes == {compute}
    assert model.final_norm.weight.dtype == kept
    assert model.embed(torch.tensor([[1, 2]])).dtype == kept
    with torch.no_grad():
        assert model.logits(torch.zeros(1, 24, dtype=kept)).dtype == compute


def test_a_device_without_a_layout_of_its_own(model: GPT, runtime: Runtime) -> None:
    """Weights are cast without it, too."""
    model.eval()
    runtime.precision.apply(model)
    plain = dataclasses.replace(
        runtime, device=dataclasses.replace(runtime.device, constant_projection=None)
    )
    first = run(model, fix_weights(model, plain, 8))
    assert [len(one.tokens) for one in first] == [6] * 4
