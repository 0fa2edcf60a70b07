"""The CPU's kernels: models without references, and reasons in compiled blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lmcore.accelerator import OP_SPECS, ConstantProjection, OpContext, OpTable
from lmcore.accelerator.op.records import load_target
from lmcore.accelerator.op.signature import signature_problem
from lmcore.errors import ConfigError
from lmcore.model.gpt import GPT
from lmcore.model.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore_cpu.kernel import constant_projection as constant
from lmcore_cpu.kernel import native
from lmcore_cpu.kernel.constant_projection import constant_projection
from lmcore_cpu.kernels import KERNELS

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    ffn_hidden_size=16,
    max_position_embeddings=16,
    padded_vocab_size=32,
    hidden_dropout=0.1,
)
SPECS = {spec.name: spec for spec in OP_SPECS}


def table(*, strict: bool = False, traits: tuple[str, ...] = ()) -> OpTable:
    impls = [replace(impl, plugin="cpu") for impl in KERNELS]
    return OpTable(OP_SPECS, impls, strict=strict, traits=traits, device_plugin="cpu")


@pytest.mark.parametrize("impl", KERNELS, ids=lambda impl: f"{impl.op}-{impl.id}")
def test_every_kernel_is_called_as_its_op_is(impl):
    """Its target exists, and its arguments are the reference's."""
    reference = load_target(SPECS[impl.op].reference)
    assert signature_problem(load_target(impl.load), reference) is None


@pytest.mark.parametrize("traits", [(), ("deterministic",)])
def test_a_gpt_in_float32_trains_without_references(traits):
    """`--strict-ops` is met by kernels of this plugin alone, also with `--deterministic`."""
    ops = table(strict=True, traits=traits)
    with ops.bind_all():
        GPT(SHAPE, OpBinding(ops, "cpu", "float32"))
        for op in ("adamw", "grad_norm"):
            ops.bind(op, OpContext("cpu", "float32"))
    assert {resolution.plugin for resolution in ops.resolutions} == {"cpu"}
    assert {resolution.source for resolution in ops.resolutions} == {"priority"}


def test_strict_names_what_a_compiled_model_lacks():
    """Each op that is left to the compiler is in one message, with the reason."""
    with pytest.raises(ConfigError) as error:
        GPT(SHAPE, OpBinding(table(strict=True), "cpu", "bfloat16", compile=True))
    assert "op `linear`" in error.value.what  # bound by itself, the first one fails
    ops = table(strict=True)

    def build():
        with ops.bind_all():
            GPT(SHAPE, OpBinding(ops, "cpu", "bfloat16", compile=True))

    with pytest.raises(ConfigError, match="ops `linear`, `bias_dropout_add` have") as error:
        build()
    assert len(error.value.why.splitlines()) == 2
    assert "the compiler fuses the reference itself" in error.value.why


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(96, 64), (50, 33), (1, 1)])
@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_constant_projection(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    size: tuple[int, int],
    bias: bool,
    mkl: bool,
    bfloat16: bool,
    compiled: bool,
) -> None:
    """It gives the product of any number of rows, for leading dims of any number."""
    monkeypatch.setattr(constant, "blas_is_faster", lambda: mkl)
    monkeypatch.setattr(constant, "has_bfloat16_products", lambda: bfloat16)
    if not compiled:
        monkeypatch.setattr(native, "_loaded", lambda: (None, "not compiled"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator).to(dtype)
    offset = torch.randn(size[0], generator=generator).to(dtype) if bias else None
    project = constant_projection(ConstantProjection(weight, offset, dtype, 8))
    if project is None:
        assert dtype == torch.bfloat16
        pytest.skip("this processor has no bfloat16 products")
    for leading in ((1,), (2,), (3,), (40,), (2, 1), (2, 5), (0,)):
        x = torch.randn(*leading, size[1], generator=generator).to(dtype)
        expected = functional.linear(x.double(), weight.double(), None)
        expected = (expected if offset is None else expected + offset.double()).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(project(x), expected, rtol=tolerance, atol=tolerance)


def test_constant_projection_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lmcore's kernels, products of one row stay with MKL where it is faster."""

    def ones(rows: int, dtype: torch.dtype = torch.float32) -> ConstantProjection:
        return ConstantProjection(torch.ones(4, 4, dtype=dtype), None, dtype, rows)

    monkeypatch.setattr(native, "_loaded", lambda: (None, "not compiled"))
    monkeypatch.setattr(constant, "blas_is_faster", lambda: True)
    assert constant_projection(ones(1)) is None
    monkeypatch.setattr(constant, "blas_is_faster", lambda: False)
    project = constant_projection(ones(1))
    assert project is not None
    assert torch.equal(project(torch.ones(1, 4)), torch.full((1, 4), 4.0))
    assert constant_projection(ones(8, torch.float64)) is None
    assert constant_projection(replace(ones(8), activation="gelu_tanh")) is None
