"""Products with weights of 8 and 4 bits, against their exact values in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcore.contract import ConstantProjection, QuantizedWeight
from lmcore.inference.fix_weights import quantize
from lmcore_cpu.kernel import quantized_projection as kernel
from lmcore_cpu.kernel.constant_projection import constant_projection
from lmcore_cpu.kernel.processor import facts

SIZES = [(64, 64), (80, 96), (128, 32), (3, 32)]


def quantized(outputs: int, inputs: int, bits: int) -> QuantizedWeight:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    made = quantize(weight, bits, torch.bfloat16)
    assert made is not None
    return made


def projection(
    weight: QuantizedWeight, bias: torch.Tensor | None = None, activation: str | None = None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    wanted = ConstantProjection(weight, bias, weight.scale_OG.dtype, activation=activation)
    return constant_projection(wanted)


def exact(weight: QuantizedWeight) -> torch.Tensor:
    wide = weight.values_OI.double().unflatten(1, (-1, weight.group_size))
    wide = wide * weight.scale_OG.double()[:, :, None]
    if weight.offset_OG is not None:
        wide = wide + weight.offset_OG.double()[:, :, None]
    return wide.flatten(1)


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, give_facts: Callable[..., None]) -> bool:
    """True if lmcore's own kernels can be used; then once without them, too."""
    if request.param == "torch":
        give_facts(instructions=())
    return bool(facts().instructions)


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("outputs, inputs", SIZES)
@pytest.mark.usefixtures("compiled")
def test_products(
    give_facts: Callable[..., None],
    outputs: int,
    inputs: int,
    bits: int,
    bias: bool,
    bfloat16: bool,
) -> None:
    """They are right for any number of rows, few and many, and leading dims."""
    give_facts(bfloat16_products=bfloat16)
    weight = quantized(outputs, inputs, bits)
    generator = torch.Generator().manual_seed(1)
    offset = torch.randn(outputs, generator=generator).bfloat16() if bias else None
    project = projection(weight, offset)
    if project is None:
        assert bits == 4
        assert outputs % 16
        return
    for leading in ((1,), (2, 1), (5,), (13,), (2, 100), (0,)):
        x = torch.randn(*leading, inputs, generator=generator).bfloat16()
        expected = x.double() @ exact(weight).T + (0 if offset is None else offset.double())
        found = project(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=8e-2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.usefixtures("compiled")
def test_a_row_does_not_depend_on_others(bits: int) -> None:
    """Among few rows its product is the same to the last bit."""
    project = projection(quantized(64, 64, bits))
    assert project is not None
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    together = project(x)
    for row in range(12):
        assert project(x[row : row + 1]).equal(together[row : row + 1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.usefixtures("compiled")
def test_rows_with_gaps(bits: int) -> None:
    """Rows of a larger tensor have the products of their copy."""
    project = projection(quantized(64, 64, bits))
    assert project is not None
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).bfloat16()[:, 64:]
    assert project(x).equal(project(x.contiguous()))


def test_a_layout_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout of 4 bits that is not known is never expanded: all products are by the operator."""
    weight = quantized(64, 64, 4)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    monkeypatch.setattr(kernel, "_codes", lambda packed: torch.zeros(64, 64, dtype=torch.uint8))
    project = projection(weight)
    assert project is not None
    torch.testing.assert_close(
        project(x).double(), x.double() @ exact(weight).T, rtol=2e-2, atol=8e-2
    )


@pytest.mark.parametrize(
    "outputs, inputs, bits, dtype",
    [
        (4, 50, 8, "bfloat16"),
        (64, 64, 8, "float32"),
        (8, 32, 4, "bfloat16"),
        (0, 32, 8, "bfloat16"),
    ],
)
def test_weights_without_a_kernel(
    give_facts: Callable[..., None],
    compiled: bool,
    outputs: int,
    inputs: int,
    bits: int,
    dtype: str,
) -> None:
    """Sizes that torch's operators read wrongly, and other dtypes, are left to the core.

    lmcore's own kernel takes all of 8 bits, on a processor without products of bfloat16.
    """
    give_facts(bfloat16_products=not compiled)
    weight = QuantizedWeight(
        bits,
        torch.zeros(outputs, inputs, dtype=torch.int8),
        torch.ones(outputs, 1, dtype=getattr(torch, dtype)),
    )
    has_kernel = compiled and bits == 8 and outputs > 0
    assert (projection(weight) is not None) == has_kernel


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("bits", [8, 4])
def test_an_activation(give_facts: Callable[..., None], bits: int) -> None:
    """A projection includes GELU, or is not made."""
    give_facts(bfloat16_products=False)
    weight = quantized(64, 64, bits)
    project = projection(weight, activation="gelu_tanh")
    assert (project is not None) == (bits == 8 and bool(facts().instructions))
    assert projection(weight, activation="relu") is None
    if project is not None:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        expected = torch.nn.functional.gelu(x.double() @ exact(weight).T, approximate="tanh")
        torch.testing.assert_close(project(x).double(), expected, rtol=2e-2, atol=2e-2)
