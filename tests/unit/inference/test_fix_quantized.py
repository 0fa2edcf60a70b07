"""Quantized weights: their values, products with them, and models that have them."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    quantize_affine,
)

from lmcore.base.errors import ConfigError
from lmcore.config.section import AcceleratorSection, Config
from lmcore.contract import OP_SPECS, ConstantProjection, OpTable, QuantizedWeight
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.projection import Linear
from lmcore.families.op_binding import OpBinding
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.options import QUANTIZATIONS, precision_of
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.fix_weights import GROUP, expanded_projection, fix_weights, quantize
from lmcore.inference.text_model import Execution
from lmcore.model.shape import ModelShape
from lmcore.plugin import discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore_cpu.kernel.constant_projection import constant_projection
from lmcore_cpu.kernel.processor import facts

SHAPE = ModelShape(2, 64, 2, 128, 32, 384, init_method_std=0.1)
LLAMA = dataclasses.replace(
    SHAPE,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
REQUESTS = [
    Request(prompt, 8, SamplingOptions(), seed=seed, top_logprobs=1)
    for seed, prompt in enumerate(([5, 99, 17], [200, 3, 44, 8], [7], [1, 2]))
]


def exact(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of a quantized weight in float64."""
    wide = weight.values_OI.double().unflatten(1, (-1, weight.group_size))
    wide = wide * weight.scale_OG.double()[:, :, None]
    if weight.offset_OG is not None:
        wide = wide + weight.offset_OG.double()[:, :, None]
    return wide.flatten(1)


@pytest.fixture(params=[SHAPE, LLAMA], ids=["gpt", "llama"])
def model(request: pytest.FixtureRequest) -> GPT:
    """A model with random weights and the core's own ops."""
    made = GPT(request.param, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
    made.initialize(7)
    return made.eval()


@pytest.fixture(params=["fp32", "bf16"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """The CPU: it has kernels for bfloat16, and expands weights for float32."""
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=request.param))
    selection = select(discover(), requested="cpu", env={})
    with start_runtime(config, discover(), selection, RankInfo()) as started:
        yield started


def run(model: GPT, execution: Execution, requests: list[Request] = REQUESTS) -> list[Continuation]:
    """Continue requests together."""
    batch = ContinuousBatch(model, vocab_size=257, execution=execution)
    made = [batch.add(request) for request in requests]
    batch.run()
    return made


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_nearest(bits: int, dtype: torch.dtype) -> None:
    """No weight is further from its value than half a step, and the rounding of the scale."""
    weight = torch.randn(48, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5] = 1.5
    quantized = quantize(weight, bits, dtype)
    assert quantized is not None
    assert quantized.scale_OG.dtype == dtype
    step = quantized.scale_OG.double()[:, :, None]
    away = (exact(quantized) - weight).unflatten(1, (-1, quantized.group_size)).abs()
    slack = 1e-6 if dtype == torch.float32 else 2**-8 * weight.abs().max()
    assert (away <= step / 2 + slack)[weight.any(dim=1)].all()
    assert not exact(quantized)[3].any()
    assert quantized.num_bytes < weight.nbytes / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_equal_weights(dtype: torch.dtype) -> None:
    """With 4 bits they keep their value, as the dtype has it, in both kinds of products."""
    values = torch.tensor([0.01, -0.003, 0.7, 0.0, 1e-6, 20.0]).repeat(16)
    weight = values[:, None].expand(-1, 2 * GROUP)
    quantized = quantize(weight, 4, dtype)
    assert quantized is not None
    slack = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    expected = weight.double()
    torch.testing.assert_close(exact(quantized), expected, rtol=slack, atol=3e-8)
    products = [expanded_projection(quantized, None)]
    products += filter(None, [constant_projection(ConstantProjection(quantized, None, dtype))])
    assert len(products) == 1 + (dtype == torch.bfloat16)
    for rows in (1, 100):  # few are multiplied by torch's operator
        x = torch.ones(rows, 2 * GROUP, dtype=dtype)
        for project in products:
            found = project(x).double()
            torch.testing.assert_close(found, (x.double() @ expected.T), rtol=0.01, atol=64 * 1e-6)


def test_8_bits_as_another_library_rounds_them() -> None:
    """Values and scales equal torchao's, but for its range to -128."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    scale, zero = choose_qparams_affine(
        weight, MappingType.SYMMETRIC_NO_CLIPPING_ERR, (1, 64), torch.int8, -127, 127
    )
    expected = quantize_affine(weight, (1, 64), scale, zero, torch.int8, -127, 127)
    found = quantize(weight, 8, torch.float32)
    assert found is not None
    torch.testing.assert_close(found.scale_OG.squeeze(1), scale.view(-1))
    assert (found.values_OI.int() - expected.int()).abs().max() <= 1  # a tie
    assert found.values_OI.equal(expected) or (found.values_OI != expected).sum() < 3


def test_inputs_that_make_no_groups() -> None:
    """A weight whose inputs are no multiple of the group is not split, with 8 bits it is taken."""
    assert quantize(torch.ones(4, GROUP + 1), 4, torch.float32) is None
    assert quantize(torch.ones(4, GROUP + 1), 8, torch.float32) is not None


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_expanded_products(bits: int, bias: bool) -> None:
    """They equal products with the exact values of the integers."""
    generator = torch.Generator().manual_seed(1)
    quantized = quantize(torch.randn(5, 2 * GROUP, generator=generator), bits, torch.float32)
    assert quantized is not None
    offset = torch.randn(5, generator=generator) if bias else None
    project = expanded_projection(quantized, offset)
    x = torch.randn(2, 3, 2 * GROUP, generator=generator)
    expected = x.double() @ exact(quantized).T + (0 if offset is None else offset.double())
    torch.testing.assert_close(project(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_model_is_that_of_the_rounded_weights(
    model: GPT, runtime: Runtime, quantization: str
) -> None:
    """Logits equal a float64 model's whose weights are the integers' values."""
    oracle = copy.deepcopy(model).double()
    bits, dtype = int(quantization[3:]), getattr(torch, runtime.precision.compute)
    with torch.no_grad():
        for module in oracle.modules():
            if isinstance(module, Linear):
                rounded = quantize(module.weight.float(), bits, dtype)
                assert rounded is not None
                module.weight.copy_(exact(rounded))
        head = quantize(oracle.head_weight.float(), 8, dtype)
        assert head is not None
        tokens = torch.tensor([[5, 99, 17, 3, 250]])
        expected = oracle(tokens) @ exact(head).T
        execution = fix_weights(model, runtime, 1, quantization)
        with execution.precision():
            found = model.logits(model(tokens))
    away = float((found - expected).norm() / expected.norm())
    assert away < (1e-5 if runtime.precision.name == "fp32" else 0.02)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_text_does_not_depend_on_others(model: GPT, runtime: Runtime, quantization: str) -> None:
    """A request's text and probabilities are the same alone and among others."""
    execution = fix_weights(model, runtime, 4, quantization)
    together = run(model, execution)
    for request, found in zip(REQUESTS, together, strict=True):
        (alone,) = run(model, execution, [request])
        assert found.tokens == alone.tokens
        for one, other in zip(found.logprobs, alone.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=0.02)


@pytest.mark.processors
def test_what_is_kept(model: GPT, runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """Embeddings and norms stay; the memory of quantized weights is free; the log says how many."""
    before = {name: one.shape for name, one in model.named_parameters()}
    with caplog.at_level(logging.INFO):
        fix_weights(model, runtime, 1, "int4")
    name = runtime.precision.name
    assert "quantized 8 matrices to int4 and the head to int8: " in caplog.text
    assert f" MB; products are computed in {name}" in caplog.text
    # The int8 head has a kernel in fp32 that stands in for products of bfloat16.
    without = 8 if facts().instructions and not facts().bfloat16_products else 9
    assert (f"{without} of the 9 quantized weights" in caplog.text) == (name == "fp32")
    for parameter_name, parameter in model.named_parameters():
        if any(kind in parameter_name for kind in ("norm", "bias", "token_embedding")):
            assert parameter.shape == before[parameter_name]
        elif "position" not in parameter_name:
            assert parameter.numel() == 0, parameter_name


def test_the_log_of_one_of_several_processes(
    model: GPT, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers are its own; with 8 bits the head is as the other matrices."""
    rank = dataclasses.replace(runtime.rank, world_size=2)
    with caplog.at_level(logging.INFO):
        fix_weights(model, dataclasses.replace(runtime, rank=rank), 1, "int8")
    assert "quantized 9 matrices to int8: " in caplog.text
    assert " MB in this process, one of 2; products" in caplog.text


def test_a_width_without_groups(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """A matrix whose inputs are no multiple of the group stays, and the log names it."""
    shape = dataclasses.replace(SHAPE, ffn_hidden_size=72)
    odd = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
    odd.initialize(7)
    execution = fix_weights(odd.eval(), runtime, 1, "int4")
    assert "no multiple of 32: 2 matrices, " in caplog.text
    assert "blocks.0.feed_forward.down" in caplog.text
    assert [len(one.tokens) for one in run(odd, execution)] == [8] * 4


def test_a_precision_with_products_of_its_own(model: GPT, runtime: Runtime) -> None:
    """Quantization does not go with a precision that computes in another way."""
    odd = dataclasses.replace(runtime.precision, name="odd", compute="float8_e4m3fn", output="x")
    with pytest.raises(ConfigError, match="cannot be used with `--precision odd`"):
        fix_weights(model, dataclasses.replace(runtime, precision=odd), 1, "int8")


def test_the_default_precision() -> None:
    """Quantized weights are multiplied in bfloat16 unless the user chooses."""
    assert precision_of(None, "int8") == "bf16"
    assert precision_of("fp32", "int8") == "fp32"
    assert precision_of(None, None) is None
