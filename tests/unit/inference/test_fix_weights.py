"""Weights that are cast and packed once, against the model that casts them in every pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from lmcore.config.section import AcceleratorSection, Config
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.build import build_model
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.op_binding import OpBinding
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.fix_weights import fix_weights
from lmcore.inference.text_model import Execution, compute_dtype
from lmcore.model.shape import ModelShape
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


T5_OWN = {
    "decoder_num_layers": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "t5_feed_forward": "gelu",
    "t5_scaled_attention": True,
    "t5_scaled_head": False,
    "t5_head_bias": True,
}


@pytest.mark.parametrize("positions", ["learned_absolute", "relative"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "gated-gelu", "gated-silu"])
def test_an_encoder_with_a_decoder(runtime: Runtime, activation: str, positions: str) -> None:
    """The logits of T5 stay, up to the rounding of the precision."""
    tied = activation in {"gelu", "relu"}
    own = T5_OWN | {
        "t5_feed_forward": activation,
        "t5_scaled_attention": tied,
        "t5_head_bias": tied,
    }
    shape = ModelShape(
        *(2, 24, 3, 40, 32, 96),
        init_method_std=0.3,
        position_embedding_type=positions,
        untie_embeddings_and_output_weights=not tied,
        add_bias_linear=tied,
        model_family="t5",
        further=tuple(sorted(own.items())),
    )
    model = build_model(shape, runtime, masked=True)
    model.initialize(3)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3, generator=source)
    model.eval()
    exact = _t5_logits(copy.deepcopy(model).double(), nullcontext)
    usual = _error(_t5_logits(model, runtime.precision.context), exact)
    execution = fix_weights(model, runtime, 4)
    assert _error(_t5_logits(model, execution.precision), exact) <= max(1e-5, 2 * usual)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the size of a difference, relative to the exact values."""
    return float((found.double() - exact).norm() / exact.norm())


def _t5_logits(model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
    """Return the logits of two texts with sources, of three tokens one after another."""
    found = []
    with torch.inference_mode(), precision():
        cache = model.new_cache(compute_dtype(model))
        cache.reserve(2, 4)
        for slot, source in enumerate(([5, 9, 17, 3], [20, 3])):
            cache.set_source(slot, source)
        hidden = model(torch.tensor([[1, 2], [1, 7]]), cache.first_tokens([0, 1], 2))
        found.append(model.logits(hidden[:, -1]))
        hidden = model(torch.tensor([[4], [8]]), cache.next_tokens([2, 2]))
        found.append(model.logits(hidden[:, -1]))
    return torch.cat(found)
