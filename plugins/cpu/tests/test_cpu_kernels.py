"""The CPU's kernels: models without references, and reasons in compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from suite.processors import combinations
from torch.nn import functional

from lmcore.base.errors import ConfigError
from lmcore.contract import OP_SPECS, ConstantProjection, OpContext, OpTable, QuantizedWeight
from lmcore.contract.op.records import load_target
from lmcore.contract.op.signature import signature_problem
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore_cpu.kernel import constant_projection as constant
from lmcore_cpu.kernel import few_rows
from lmcore_cpu.kernel.constant_projection import constant_projection
from lmcore_cpu.kernel.linear import narrow_linear
from lmcore_cpu.kernel.processor import facts
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
    """`--strict-ops` is met by kernels of this plugin alone, if torch has a library of products."""
    ops = table(strict=True, traits=traits)

    def bind() -> None:
        with ops.bind_all():
            GPT(SHAPE, OpBinding(ops, "cpu", "float32"))
            for op in ("adamw", "grad_norm"):
                ops.bind(op, OpContext("cpu", "float32"))

    if not (facts().onednn or facts().mkl):
        with pytest.raises(ConfigError, match="op `linear` has no kernel") as error:
            bind()
        assert "no MKL" in error.value.why
        assert "no oneDNN" in error.value.why
        return
    bind()
    assert {resolution.plugin for resolution in ops.resolutions} == {"cpu"}
    assert {resolution.source for resolution in ops.resolutions} == {"priority"}


def test_strict_names_what_a_compiled_model_lacks(give_facts: Callable[..., None]) -> None:
    """Each op that is left to the compiler is in one message, with the reason."""
    give_facts(bfloat16_products=False)
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
@pytest.mark.processors
def test_constant_projection(dtype: torch.dtype, size: tuple[int, int], bias: bool) -> None:
    """It gives the product of any number of rows, for leading dims of any number."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator).to(dtype)
    offset = torch.randn(size[0], generator=generator).to(dtype) if bias else None
    project = constant_projection(ConstantProjection(weight, offset, dtype, 8))
    if project is None:  # torch's own product is as fast, or the only one
        here = facts()
        assert not (here.onednn_bfloat16 if dtype == torch.bfloat16 else here.onednn)
        return
    for leading in ((1,), (2,), (3,), (40,), (2, 1), (2, 5), (0,)):
        x = torch.randn(*leading, size[1], generator=generator).to(dtype)
        expected = functional.linear(x.double(), weight.double(), None)
        expected = (expected if offset is None else expected + offset.double()).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(project(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("given", combinations().values(), ids=combinations())
def test_the_facts_decide(
    monkeypatch: pytest.MonkeyPatch, give_facts: Callable[..., None], given: dict[str, Any]
) -> None:
    """The facts of a processor choose its kernel of a constant projection, on any machine."""
    give_facts(**given)
    monkeypatch.setattr(few_rows, "PackedWeight", stand_in("few rows"))
    monkeypatch.setattr(constant, "_packed", stand_in("oneDNN"))
    monkeypatch.setattr(constant, "_packed_for_many", stand_in("MKL and oneDNN"))

    def chosen(weight: torch.Tensor | QuantizedWeight, rows: int = 8) -> str | None:
        wanted = ConstantProjection(weight, None, torch.float32, rows)
        project = constant_projection(wanted)
        if project is None:
            return None
        try:
            project(torch.ones(rows, 32, dtype=torch.bfloat16))
        except Chosen as name:
            return str(name)
        return "torch"

    mkl = given["mkl"] and given["prefers_mkl"]
    native, onednn = given["instructions"], given["onednn"]
    bfloat16, onednn_bfloat16 = given["bfloat16_products"], given["onednn_bfloat16"]
    weight = torch.ones(32, 32)
    libraries = "oneDNN" if onednn and not mkl else None
    fp32 = "few rows" if mkl and "avx512" in native else libraries
    assert chosen(weight, 1) == fp32
    assert chosen(weight) == ("MKL and oneDNN" if mkl and onednn and fp32 is None else fp32)
    few = "few rows" if native and not bfloat16 else None
    units = "few rows" if "amx" in native else None
    assert chosen(weight.bfloat16()) == (units or few or ("oneDNN" if onednn_bfloat16 else None))
    for dtype, otherwise in ((torch.float32, None), (torch.bfloat16, "torch")):
        values, scale = torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 1, dtype=dtype)
        assert chosen(QuantizedWeight(8, values, scale)) == (few or otherwise)


class Chosen(Exception):  # noqa: N818 - it says which kernel was called
    """Name of a kernel."""


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_narrow_projection_is_autocasts(x_dtype: torch.dtype, bias: bool) -> None:
    """Under autocast outputs and gradients are as torch's; without it nothing is narrowed."""
    generator = torch.Generator().manual_seed(3)

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        generator.manual_seed(3)
        x = torch.randn(2, 24, 40, generator=generator).to(x_dtype).requires_grad_()
        weight = torch.randn(56, 40, generator=generator, requires_grad=True)
        offset = torch.randn(56, generator=generator, requires_grad=True) if bias else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(x, weight, offset)
        (out.float() * torch.randn(out.shape, generator=generator)).sum().backward()
        found = [x.grad, weight.grad, *([offset.grad] if offset is not None else [])]
        return [out, *(one for one in found if one is not None)]

    ours, theirs = run(narrow_linear), run(functional.linear)
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours[3:], theirs[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert narrow_linear(x, weight, None).dtype == torch.float32


def stand_in(name: str) -> Callable[..., Any]:
    """Return a function in place of one that makes a kernel which this machine may not execute."""

    def project(x: torch.Tensor) -> torch.Tensor:
        raise Chosen(name)

    vars(project).update(project=project)
    return lambda *arguments, **named: project


def test_constant_projection_of_few_rows(give_facts: Callable[..., None]) -> None:
    """Without lmcore's kernels, products of one row stay with MKL where it is faster."""

    def ones(rows: int, dtype: torch.dtype = torch.float32) -> ConstantProjection:
        return ConstantProjection(torch.ones(4, 4, dtype=dtype), None, dtype, rows)

    give_facts(instructions=(), mkl=True, prefers_mkl=True)
    assert constant_projection(ones(1)) is None
    give_facts(prefers_mkl=False, onednn=True)
    project = constant_projection(ones(1))
    assert project is not None
    assert torch.equal(project(torch.ones(1, 4)), torch.full((1, 4), 4.0))
    assert constant_projection(ones(8, torch.float64)) is None
    assert constant_projection(replace(ones(8), activation="gelu_tanh")) is None
