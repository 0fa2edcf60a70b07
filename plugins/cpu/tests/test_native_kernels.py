"""The C++ of `native/cpu`, for each instruction set of this processor, against float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from lmcore.contract.dtype import dtype_name
from lmcore.contract.op import reference, torch_kernels
from lmcore_cpu.kernel import activation, few_rows, native, processor, sequence_attention
from lmcore_cpu.kernel.few_rows import PackedWeight
from lmcore_cpu.kernel.next_token_attention import next_token_attention
from lmcore_cpu.kernel.weight_memory import new_weight

INSTRUCTIONS = ("amx", "avx512_bf16", "avx512", "avx2")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this processor has kernels for."""
    if request.param not in processor.facts().instructions:
        pytest.skip(f"no kernels for {request.param}: {native.reason()}")
    return str(request.param)


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [(96, 64), (50, 33), (1, 1), (33, 7)])
def test_a_projection(
    instructions: str, size: tuple[int, int], dtype: torch.dtype, gelu: bool
) -> None:
    """It is the product in float32, for any number of rows; a row does not depend on others.

    Matrix units multiply bfloat16, to which they round float32 activations.
    """
    outputs, inputs = size
    weight = (numbers(*size) * (30 if dtype == torch.int8 else 0.3)).to(dtype)
    scale = numbers(outputs, seed=1).abs() / 60 if dtype == torch.int8 else None
    bias = numbers(outputs, seed=2)
    packed = PackedWeight(weight, bias, scale, gelu=gelu, instructions=instructions)
    wide = weight.double() * (1 if scale is None else scale.double()[:, None])
    paired = instructions == "amx" and dtype == torch.bfloat16
    for rows in (1, 2, 5, 6, 7, 12, 13, 17, 24, 25, 33, 64, few_rows._MOST_ROWS + 1):
        for x_dtype in DTYPES:
            x = numbers(rows, inputs, seed=rows).to(x_dtype)
            product_x = x.bfloat16() if paired else x
            expected = functional.linear(product_x.double(), wide, bias.double())
            if gelu:
                expected = functional.gelu(expected, approximate="tanh")
            found = packed.project(x)
            assert found.dtype == x_dtype
            for output in DTYPES:
                other = PackedWeight(
                    *(weight, bias, scale), gelu=gelu, output=output, instructions=instructions
                ).project(x)
                assert other.dtype == output
                assert output != x_dtype or torch.equal(other, found)
                assert x_dtype != torch.float32 or torch.equal(other, found.to(output))
            tolerance = 2e-5 if x_dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
            if rows <= few_rows._MOST_ROWS or paired:
                alone = torch.cat([packed.project(x[row : row + 1]) for row in range(rows)])
                assert torch.equal(found, alone)


def test_leading_dims_layouts_and_no_rows(instructions: str) -> None:
    """Rows may have several dims, not be adjacent in memory, and be none."""
    packed = PackedWeight(numbers(20, 8), None, instructions=instructions)
    x = numbers(3, 8, 4).transpose(1, 2)
    torch.testing.assert_close(packed.project(x), functional.linear(x, numbers(20, 8)))
    assert packed.project(numbers(0, 8)).shape == (0, 20)
    with pytest.raises(ValueError, match="a weight with 8 inputs"):
        packed.project(numbers(2, 7))
    with pytest.raises(ValueError, match="float64"):
        packed.project(numbers(2, 8).double())


def test_numbers_that_are_not_finite(instructions: str) -> None:
    """NaN stays in its row, in bfloat16 too, and GELU is exact where e^x is zero or infinite."""
    x = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 1.0]])
    for dtype in DTYPES:
        for weight in (torch.eye(2), torch.eye(2, dtype=torch.bfloat16)):
            found = PackedWeight(weight, None, instructions=instructions).project(x.to(dtype))
            assert torch.equal(found.isnan().any(1), torch.tensor([False, True, True]))
            assert torch.equal(found[0], x[0].to(dtype))
    gelu = PackedWeight(torch.eye(1), None, gelu=True, instructions=instructions)
    ends = torch.tensor([[-1e30], [-40.0], [-9.0], [0.0], [9.0], [1e30]])
    expected = functional.gelu(ends.double(), approximate="tanh")
    torch.testing.assert_close(gelu.project(ends).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("channels", [64, 80, 5, 256])
def test_attention_of_the_next_token(
    instructions: str, channels: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """It appends to each slot and attends to its positions; nothing else is read or written."""
    attend = next_token_attention(dtype, channels, instructions=instructions)
    assert attend is not None
    lengths = [0, 1, 37, 16]
    longest, slots, capacity = max(lengths), 6, 40
    keys, values = (numbers(slots, heads[1], capacity, channels, seed=one) for one in (1, 2))
    for slot, length in enumerate([*lengths, 0, 0]):
        keys[slot, :, length:] = values[slot, :, length:] = float("nan")
    keys, values = keys.to(dtype), values.to(dtype)
    before = keys.clone(), values.clone()
    packed = numbers(len(lengths), 1, heads[0] + 2 * heads[1], channels, seed=3).to(dtype)
    q, k, v = (
        one.squeeze(1) for one in packed.split([heads[0], heads[1], heads[1]], dim=2)
    )  # strides of a packed projection
    found = attend(q, k, v, keys, values, torch.tensor(lengths), longest)
    assert found.shape == q.shape
    assert found.dtype == dtype
    shared = heads[0] // heads[1]
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length], k[row])
        assert torch.equal(values[row, :, length], v[row])
        k_KTD, v_KTD = (one[row, :, : length + 1].double() for one in (keys, values))
        expected = functional.scaled_dot_product_attention(
            q[row].double().unsqueeze(1),
            k_KTD.repeat_interleave(shared, 0),
            v_KTD.repeat_interleave(shared, 0),
        ).squeeze(1)
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[row].double(), expected, rtol=tolerance, atol=tolerance)
    for now, then in zip((keys, values), before, strict=True):
        for row, length in enumerate(lengths):
            now[row, :, length] = then[row, :, length]
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


def test_attention_that_is_not_finite(instructions: str) -> None:
    """A key that is NaN makes its own sequence NaN, and no other; large scores stay finite."""
    attend = next_token_attention(torch.float32, 16, instructions=instructions)
    assert attend is not None
    keys, values = numbers(2, 1, 8, 16) * 1e4, numbers(2, 1, 8, 16, seed=1)
    keys[0, 0, 3] = float("nan")
    q, k, v = (numbers(2, 1, 16, seed=seed) * 1e4 for seed in (2, 3, 4))
    found = attend(q, k, v, keys, values, torch.tensor([6, 6]), 6)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("change", ["longer", "more", "values", "transposed"])
def test_attention_writes_within_the_slots(instructions: str, change: str) -> None:
    """Slots that are too small, or laid out otherwise, are refused before a byte is written."""
    attend = next_token_attention(torch.float32, 16, instructions=instructions)
    assert attend is not None
    q = numbers(3 if change == "more" else 2, 1, 16)
    keys, values = torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 8, 16)
    if change == "values":
        values = values[:, :, :4]
    if change == "transposed":
        keys = values = torch.zeros(2, 1, 16, 8).transpose(2, 3)
    longest = 8 if change == "longer" else 3
    with pytest.raises(ValueError, match="no room for"):
        attend(q, q, q, keys, values, torch.tensor([longest] * len(q)), longest)
    assert not keys.any()


def test_what_has_no_kernel() -> None:
    """Other dtypes and very wide heads are left to torch."""
    assert next_token_attention(torch.float64, 64) is None
    assert next_token_attention(torch.float32, 257) is None


@pytest.mark.parametrize(
    "module, expected",
    [
        pytest.param(None, "installed without a C++ compiler", id="absent"),
        pytest.param({"INTERFACE": 0}, "of another version of lmcore", id="old"),
        pytest.param(
            {"INTERFACE": native._INTERFACE, "blocks": dict},
            "neither AVX-512 nor AVX2",
            id="processor",
        ),
        pytest.param(
            {"INTERFACE": native._INTERFACE, "blocks": lambda: {"avx2": 16}, "has_threads": bool},
            "no OpenMP threads",
            id="threads",
        ),
    ],
)
def test_why_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, module: dict[str, object] | None, expected: str
) -> None:
    """The reason is given, and torch's libraries are used."""
    fake = module and SimpleNamespace(__file__="_kernels.so", **module)
    monkeypatch.setitem(sys.modules, "lmcore_cpu._kernels", fake)
    found, why = native._load()
    assert found is None
    assert expected in why


def test_without_the_module_nothing_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the module there are no instruction sets, and no kernel is offered."""
    monkeypatch.setattr(native, "_loaded", lambda: (None, "not compiled"))
    monkeypatch.setattr(processor, "_here", processor.Facts())
    assert processor.facts().instructions == ()
    assert processor.facts().kernels is None
    assert next_token_attention(torch.float32, 64) is None


def test_memory_of_weights() -> None:
    """Weights share chunks and do not overlap; a large one has a chunk alone."""
    sizes = [((3, 5), torch.bfloat16), ((700,), torch.float32), ((40 * 2**20,), torch.int8)]
    made = [new_weight(size, dtype) for size, dtype in sizes * 2]
    for number, one in enumerate(made):
        one.fill_(number)
        assert one.data_ptr() % 64 == 0
        assert one.is_contiguous()
    for number, (one, (size, dtype)) in enumerate(zip(made, sizes * 2, strict=True)):
        assert (tuple(one.shape), one.dtype) == (size, dtype)
        assert bool((one == number).all())


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


SEQUENCES = {
    "blocks": (2, 4, 4, 128, 128, 64, True),
    "the last block is not full": (1, 3, 3, 100, 100, 32, True),
    "shared keys": (2, 6, 2, 130, 130, 96, True),
    "one query head for all": (1, 4, 1, 65, 65, 128, True),
    "all keys": (2, 2, 2, 70, 200, 64, False),
    "many channels": (1, 1, 1, 10, 10, 256, True),
}


@pytest.mark.parametrize("narrow", DTYPES)
@pytest.mark.parametrize("size", SEQUENCES.values(), ids=SEQUENCES)
def test_attention_of_sequences(
    size: tuple[int, ...],
    narrow: torch.dtype,
    give_facts: Callable[..., None],
    instructions: str,
) -> None:
    """Output and gradients are nearer to float64's than torch's, or within roundings of it."""
    give_facts(instructions=(instructions,))
    if not processor.facts().attends_sequences(dtype_name(narrow)):
        pytest.skip(f"there is no kernel for {instructions} and {narrow}")
    batch, heads, groups, queries, keys, channels, causal = size
    given = [
        numbers(batch, rows, count, channels, seed=seed).to(narrow).transpose(1, 2)
        for seed, (rows, count) in enumerate(
            [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
        )
    ]

    def run(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, grad = (one.to(dtype, copy=True) for one in given)
        for one in inputs:
            one.requires_grad_()
        out = attend(*inputs, causal=causal)
        is_own = type(out.grad_fn).__name__ == "_AttentionBackward"
        assert is_own == (attend is sequence_attention.attention)
        out.backward(grad)
        return [out.detach(), *(one.grad for one in inputs)]

    exact = run(torch_kernels.attention, torch.float64)
    theirs = run(torch_kernels.attention, narrow)
    found = run(sequence_attention.attention, narrow)
    least = 4e-3 if narrow == torch.bfloat16 else 1e-6
    for one, other, truth in zip(found, theirs, exact, strict=True):
        assert one.dtype == narrow
        assert relative_error(one, truth) < max(1.1 * relative_error(other, truth), least)
    again = run(sequence_attention.attention, narrow)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_attention_of_sequences_has_the_same_bits_with_more_threads_and_samples(
    threads: int, dtype: torch.dtype
) -> None:
    """A head's sums depend neither on the number of threads nor on other samples."""
    if not processor.facts().attends_sequences(dtype_name(dtype)):
        pytest.skip("there is no kernel for this processor")
    q, k, v = (numbers(3, 4, 90, 64, seed=seed).to(dtype) for seed in range(3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            sequence_attention.attention(*(x[i : i + 1] for x in (q, k, v)), causal=True)
            for i in range(3)
        ]
        torch.set_num_threads(threads)
        assert torch.equal(sequence_attention.attention(q, k, v, causal=True), torch.cat(alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_sequences_with_an_outlier_and_without_a_number(dtype: torch.dtype) -> None:
    """Large scores do not overflow; a NaN reaches the queries that see it, and no others."""
    if not processor.facts().attends_sequences(dtype_name(dtype)):
        pytest.skip("there is no kernel for this processor")
    q, k, v = (numbers(1, 1, 80, 32, seed=seed).to(dtype) for seed in range(3))
    large = [one * 300 if one is not v else v for one in (q, k, v)]
    found = sequence_attention.attention(*large, causal=True)
    expected = torch_kernels.attention(*(one.double() for one in large), causal=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    k[0, 0, 70, 3] = float("nan")
    seen = sequence_attention.attention(q, k, v, causal=True).isnan().any(-1)[0, 0]
    assert seen.tolist() == [query >= 70 for query in range(80)]


def test_what_the_kernel_of_sequences_does_not_compute_goes_another_way() -> None:
    """A mask, another dtype, other channels, and fewer queries than keys in a causal case."""
    q = numbers(1, 2, 8, 40).bfloat16()
    assert torch.equal(
        sequence_attention.attention(q, q, q, causal=True),
        torch_kernels.attention(q, q, q, causal=True),
    )
    q = numbers(1, 2, 8, 64)
    for given, rest in (
        ((q.double(),) * 3, {}),
        ((q.bfloat16(),) * 3, {"mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool)}),
        ((q.bfloat16()[:, :, -2:], q.bfloat16(), q.bfloat16()), {}),
    ):
        expected = torch_kernels.attention(*given, causal=True, **rest)
        assert torch.equal(sequence_attention.attention(*given, causal=True, **rest), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert sequence_attention.attention(q, q, q, causal=True).dtype == torch.bfloat16


ACTIVATIONS = {"bias_gelu": activation.bias_gelu, "swiglu": activation.swiglu}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(
    name: str, dtype: torch.dtype, give_facts: Callable[..., None], instructions: str
) -> None:
    """Output and gradients are near the reference in float64, rounded."""
    give_facts(instructions=(instructions,))
    columns = 1040 if name == "bias_gelu" else 2 * 528
    x, bias = 3 * numbers(2, 150, columns), numbers(columns, seed=1)
    x[0, 0, :8] = torch.tensor([0.0, -0.0, 30.0, -30.0, 1e4, -1e4, 1e-30, -88.0])
    grad = numbers(2, 150, 1040 if name == "bias_gelu" else 528, seed=2)
    given = [x.to(dtype), bias][: 2 if name == "bias_gelu" else 1]

    def run(compute: Callable[..., torch.Tensor], *, wide: bool) -> list[torch.Tensor]:
        inputs = [one.to(torch.float64 if wide else one.dtype, copy=True) for one in given]
        for one in inputs:
            one.requires_grad_()
        out = compute(*inputs)
        out.backward(grad.to(dtype).to(out.dtype))
        return [out.detach(), *(one.grad for one in inputs)]

    found, exact = run(ACTIVATIONS[name], wide=False), run(getattr(reference, name), wide=True)
    unit = 2**-8 if dtype == torch.bfloat16 else 2e-6
    for one, truth in zip(found, exact, strict=True):
        summed = 4 if one.ndim == 1 else 1  # the bias's gradient is a sum over 300 rows
        torch.testing.assert_close(one.double(), truth, rtol=unit, atol=4 * unit * summed)
    assert [one.dtype for one in found] == [dtype, *(one.dtype for one in given)]
    infinite = x.clone()
    infinite[1, 3, 5] = float("nan")
    out = ACTIVATIONS[name](infinite.to(dtype), *given[1:])
    assert out.isnan().nonzero().tolist() == [[1, 3, 5]]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_other_sizes_dtypes_and_layouts(name: str) -> None:
    """Torch computes partial vectors and float64; rows may be strided."""
    wide, narrow = torch.float64, torch.float32
    for size, dtype in (((3, 18), narrow), ((3, 32), wide), ((0, 32), narrow)):
        x = numbers(*size).to(dtype)
        given = (x, numbers(size[1], seed=1).to(dtype)) if name == "bias_gelu" else (x,)
        torch.testing.assert_close(ACTIVATIONS[name](*given), getattr(reference, name)(*given))
    x = numbers(32, 7).t()
    given = (x, numbers(32, seed=1)) if name == "bias_gelu" else (x,)
    torch.testing.assert_close(ACTIVATIONS[name](*given), getattr(reference, name)(*given))
