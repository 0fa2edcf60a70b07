"""The Triton kernels under Triton's interpreter, beside the references in float64.

The cases are from `tests/backend`, which every kernel of a device has to pass, and cases of this
implementation: sizes around its tiles, memory layouts, random numbers, blocks of tokens.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="`tox -e triton` installs Triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("`tox -e triton` sets TRITON_INTERPRET=1", allow_module_level=True)

from lmcore.base.errors import LmcoreError
from lmcore.contract import OP_SPECS
from lmcore.contract.op import reference
from lmcore.contract.op.records import load_target
from lmcore.contract.op.signature import signature_problem
from lmcore_triton import linear_cross_entropy as head
from lmcore_triton.activation import bias_gelu, swiglu
from lmcore_triton.cross_entropy import cross_entropy
from lmcore_triton.dropout import bias_dropout_add
from lmcore_triton.launching import column_block, num_parts
from lmcore_triton.linear_cross_entropy import linear_cross_entropy
from lmcore_triton.norm import layer_norm, rms_norm
from lmcore_triton.offers import WIDEST_NORM, WIDEST_SOFTMAX, op_impls
from lmcore_triton.rotary import rotary_embedding
from lmcore_triton.softmax import scaled_masked_softmax

# numpy's, of lanes that are masked out, and of how the interpreter of Triton 3.6 reads a number
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

ROOT = Path(__file__).resolve().parents[3]
SPECS = {spec.name: spec for spec in OP_SPECS}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def load(name: str, path: Path):
    """Return a file of this repository as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNELS = {impl.op: load_target(impl.load) for impl in op_impls("cpu")}
CASES = [
    case
    for case in load("backend_cases", ROOT / "tests/backend/conftest.py").CASES
    if case.op in KERNELS and case.label != "several blocks"  # 65537 logits are minutes here
]
FIRST = {case.op: case for case in reversed(CASES)}
"""The case of each op that is tried in two dtypes in the fast set, too."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def compare(kernel, arguments, *, grad=None, **named) -> None:
    """Hold value and gradients to the op's tolerances, beside the reference in float64."""
    op = kernel.__name__
    out = kernel(*arguments, **named)
    oracle = [
        argument.detach().double().requires_grad_(argument.requires_grad)
        if isinstance(argument, Tensor) and argument.is_floating_point()
        else argument
        for argument in arguments
    ]
    wanted = getattr(reference, op)(*oracle, **named)
    assert out.shape == wanted.shape
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    leaves = [
        argument
        for argument in arguments
        if isinstance(argument, Tensor) and argument.requires_grad
    ]
    twins = [tensor for tensor in oracle if isinstance(tensor, Tensor) and tensor.requires_grad]
    grads = torch.autograd.grad(out, leaves, grad)
    wanted_grads = torch.autograd.grad(wanted, twins, grad.double())
    for leaf, found, right in zip(
        [out, *leaves], [out, *grads], [wanted, *wanted_grads], strict=True
    ):
        assert found.dtype == leaf.dtype
        least = min((leaf.dtype, arguments[0].dtype), key=lambda dtype: -torch.finfo(dtype).eps)
        tolerance = SPECS[op].tolerances[str(least).removeprefix("torch.")]
        scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
        torch.testing.assert_close(
            found.detach().double(),
            right.detach(),
            rtol=tolerance.relative,
            atol=tolerance.absolute * scale,
        )


@pytest.mark.parametrize("impl", op_impls("cpu"), ids=lambda impl: impl.op)
def test_every_kernel_is_called_as_its_op_is(impl):
    """Its target can be loaded, and takes the reference's arguments."""
    kernel = load_target(impl.load)
    assert signature_problem(kernel, load_target(SPECS[impl.op].reference)) is None


@pytest.mark.parametrize(
    "case,dtype",
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.op}: {case.label}, {dtype}",
            marks=() if dtype == torch.float32 or case is FIRST[case.op] else pytest.mark.full,
        )
        for place, case in enumerate(CASES)
        for dtype in (torch.float32, DTYPES[1 + place % 2])
    ],
)
def test_the_cases_of_every_kernel(case, dtype):
    """The kernels agree with the references, and do not change their inputs."""
    arguments = dict(case.others)
    for place, values in case.tensors.items():
        copy = values.to(dtype).detach().clone(memory_format=torch.preserve_format)
        arguments[place] = copy.requires_grad_()
    ordered = [arguments[place] for place in range(len(arguments))]
    tensors = [tensor for tensor in ordered if isinstance(tensor, Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    compare(KERNELS[case.op], ordered, **case.kwargs)
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach().nan_to_num(), kept.nan_to_num())


WIDTHS = [1, 2, 31, 128, 129, 384, 1000, 1025, 1536]


@pytest.mark.parametrize(
    "width",
    # One in each dtype in the fast set.
    [
        pytest.param(width, marks=() if width in {1, 129, 1536} else pytest.mark.full)
        for width in WIDTHS
    ],
)
def test_rows_of_any_width(width):
    """Widths around tiles, and several tiles side by side, with rows that fill none of them."""
    dtype = DTYPES[WIDTHS.index(width) % 3]
    rows = 5 if width > 500 else 19
    x, gain, offset = draw(rows, width, dtype=dtype), draw(width, seed=1), draw(width, seed=2)
    compare(layer_norm, (x, gain, offset, 1e-2))
    compare(rms_norm, (x, gain, 1e-2))
    compare(bias_gelu, (x, offset))
    compare(swiglu, (draw(rows, 2 * width, dtype=dtype),))
    compare(bias_dropout_add, (x, offset, x.detach() + 1), dropout=0.0, training=True)
    compare(scaled_masked_softmax, (x.view(1, 1, rows, width), None, 0.7))
    targets = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1))
    compare(cross_entropy, (x, targets))


@pytest.mark.full
def test_random_sizes():
    """Random sizes, each in another dtype."""
    sizes = random.Random(17)
    for _ in range(4):
        dtype = sizes.choice(DTYPES)
        batch, length, width = sizes.randint(1, 3), sizes.randint(1, 20), sizes.randint(2, 300)
        x = draw(batch, length, width, dtype=dtype)
        compare(layer_norm, (x, draw(width, seed=1), draw(width, seed=2), 1e-2))
        compare(bias_gelu, (x, draw(width, seed=1, dtype=dtype)))
        half = sizes.randint(1, width // 2)
        angles = draw(length, half).detach()
        compare(rotary_embedding, (x.unsqueeze(1), angles.cos(), angles.sin()))
        mask = torch.rand(length, width, generator=torch.Generator().manual_seed(2)) < 0.5
        compare(scaled_masked_softmax, (x, mask, 1.3))


def test_a_vocabulary_of_several_blocks():
    """Rows of more logits than registers, with a last block of few."""
    targets = torch.tensor([0, 4095, 4096, 8999])
    compare(cross_entropy, (draw(4, 9000), targets))
    compare(cross_entropy, (draw(4, 9000, dtype=torch.bfloat16), targets))


def test_many_rows_are_shared_among_programs():
    """With more tiles than programs, each program takes several, and no row is lost."""
    columns = 8
    assert num_parts(100_000, 4, columns) == 132
    assert num_parts(5, 4, columns) == 2
    rows = 2200
    assert num_parts(rows, 1, columns) * 10 < rows
    x = draw(rows, 3)
    compare(bias_gelu, (x, draw(3, seed=1)))
    compare(rms_norm, (x, draw(3, seed=1), 1e-2))


@pytest.mark.parametrize("width", [1, 100, 768, 1600, 2304, 3072, 6400, 12288, 50304])
def test_tiles_leave_little_idle(width):
    """The columns of tiles are a power of two that fits the width about."""
    block = column_block(width, 1024)
    assert block & (block - 1) == 0
    assert -width % block <= max(width // 16, 127)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "every second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_and_gradients_of_any_layout(layout):
    """Inputs in another memory layout, or with gaps, give the same."""
    there = LAYOUTS[layout]
    x = there(draw(3, 5, 16).detach()).requires_grad_()
    grad = there(draw(3, 5, 16, seed=5).detach())
    gain, offset = draw(16, seed=1), draw(16, seed=2)
    compare(layer_norm, (x, gain, offset, 1e-5), grad=grad)
    compare(rms_norm, (x, gain, 1e-5), grad=grad)
    compare(bias_gelu, (x, offset), grad=grad)
    compare(swiglu, (x,), grad=there(draw(3, 5, 8, seed=5).detach()))
    residual = there(draw(3, 5, 16, seed=7).detach()).requires_grad_()
    compare(bias_dropout_add, (x, offset, residual), grad=grad, dropout=0.0, training=True)
    compare(bias_dropout_add, (x, None, residual), grad=grad, dropout=0.0, training=True)
    compare(scaled_masked_softmax, (x, there(torch.rand(3, 5, 16) < 0.3), 0.5), grad=grad)
    angles = draw(3, 6, seed=3).detach()
    heads = there(draw(2, 4, 3 * 14).detach()).unflatten(-1, (3, 14)).permute(0, 1, 2, 3)
    heads = heads.requires_grad_()
    compare(rotary_embedding, (heads, angles.cos(), angles.sin()))
    logits = there(draw(1, 5, 16).detach())[0].requires_grad_()
    compare(cross_entropy, (logits, torch.tensor([0, 3, 15, 7, 7])))
    compare(
        linear_cross_entropy,
        (logits, logits.detach().clone(), torch.tensor([0, 3, 4, 2, 2]), torch.rand(5)),
    )


def test_a_gradient_that_is_one_number_everywhere():
    """A sum passes an expanded gradient on: one value in memory, for all elements."""
    grad = torch.ones(()).expand(2, 3, 16)
    x, gain, offset = draw(2, 3, 16), draw(16, seed=1), draw(16, seed=2)
    compare(layer_norm, (x, gain, offset, 1e-5), grad=grad)
    compare(bias_gelu, (x, offset), grad=grad)
    compare(swiglu, (x,), grad=torch.ones(()).expand(2, 3, 8))
    compare(bias_dropout_add, (x, offset, draw(2, 3, 16)), grad=grad, dropout=0.0, training=True)
    compare(scaled_masked_softmax, (x, None, 0.5), grad=grad)
    compare(cross_entropy, (draw(3, 16), torch.tensor([1, 2, 3])), grad=torch.ones(()).expand(3))


def test_heads_of_a_packed_projection_are_not_copied():
    """Rotated heads lie as the heads of the projection did, and gradients as they came."""
    packed = draw(2, 5, 3, 4, 8)
    q = packed.permute(2, 0, 3, 1, 4)[0]
    angles = draw(5, 3, seed=3).detach()
    out = rotary_embedding(q, angles.cos(), angles.sin())
    assert out.transpose(1, 2).is_contiguous()
    compare(rotary_embedding, (q.detach().requires_grad_(), angles.cos(), angles.sin()))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7), (2, 3, 5, 7), (2, 1, 3, 5, 7)], ids=len)
def test_masks_of_any_number_of_dims(shape):
    """A mask is broadcast as torch does it, also over dims that it does not have."""
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden = hidden.index_fill(-2, torch.tensor([1]), True) if len(shape) > 1 else hidden
    x = draw(*(2, 3, 5, 7) if len(shape) < 5 else (2, 4, 3, 5, 7))
    compare(scaled_masked_softmax, (x, hidden, 0.8))


@pytest.mark.parametrize(
    "dropout",
    [pytest.param(0.02, marks=pytest.mark.full), 0.5, pytest.param(0.9, marks=pytest.mark.full)],
)
def test_the_dropped_share_matches_the_probability(dropout):
    """The share is the probability's, survivors are scaled up, gradients pass where values do."""
    x = torch.full((41, 707), 0.75).requires_grad_()
    bias, residual = torch.full((707,), 0.25).requires_grad_(), torch.zeros(41, 707)
    torch.manual_seed(3)
    out = bias_dropout_add(x, bias, residual, dropout=dropout, training=True)
    grad_x, grad_bias = torch.autograd.grad(out.sum(), [x, bias])
    kept = out != 0
    deviation = (dropout * (1 - dropout) / out.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - dropout)) < 4 * deviation
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - dropout)))
    assert torch.equal(grad_x, out)
    torch.testing.assert_close(grad_bias, grad_x.sum(0))


def test_neighbours_are_dropped_independently():
    """Channels and rows are uncorrelated, at any distance within a tile or a call."""
    torch.manual_seed(4)
    out = bias_dropout_add(
        torch.ones(128, 512), None, torch.zeros(128, 512), dropout=0.5, training=True
    )
    again = bias_dropout_add(
        torch.ones(128, 512), None, torch.zeros(128, 512), dropout=0.5, training=True
    )
    kept, other = ((tensor != 0).double().flatten() - 0.5 for tensor in (out, again))
    bound = 4.5 / kept.numel() ** 0.5
    for distance in (1, 2, 3, 64, 128, 192, 256, 512, 1024, 512 * 16):
        assert abs((kept[:-distance] * kept[distance:]).mean().item() * 4) < bound, distance
    assert abs((kept * other).mean().item() * 4) < bound


def test_a_layer_computed_again_drops_the_same():
    """Recomputation under a restored state gives the gradients that keeping everything gives."""
    x, bias, residual = draw(3, 20, 70), draw(70, seed=1), draw(3, 20, 70, seed=2)

    def layer(x: Tensor) -> Tensor:
        return bias_dropout_add(x, bias, residual, dropout=0.3, training=True).square()

    torch.manual_seed(3)
    kept = torch.autograd.grad(layer(x).sum(), [x, bias, residual])
    torch.manual_seed(3)
    again = torch.autograd.grad(
        checkpoint(layer, x, use_reentrant=False).sum(), [x, bias, residual]
    )
    assert all(torch.equal(first, other) for first, other in zip(kept, again, strict=True))


def test_dropout_keeps_no_mask():
    """Beside the outputs 8 bytes are kept for the backward pass, whatever the size."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        bias_dropout_add(draw(4, 33, 65), draw(65), draw(4, 33, 65), dropout=0.1, training=True)
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == 8


def test_dropping_all_leaves_the_residual():
    """A probability of 1 gives the residual and no gradient to the branch, not NaN."""
    x, bias, residual = draw(2, 3, 9), draw(9), draw(2, 3, 9, seed=2)
    out = bias_dropout_add(x, bias, residual, dropout=1.0, training=True)
    assert torch.equal(out, residual)
    grad_x, grad_bias = torch.autograd.grad(out.sum(), [x, bias])
    assert not grad_x.any()
    assert not grad_bias.any()


def test_equal_inputs_give_equal_bits():
    """Sums over rows are taken in one order: the weights' gradients repeat to the last bit."""
    x, gain, offset = draw(90, 40), draw(40, seed=1), draw(40, seed=2)
    targets = torch.randint(40, (90,), generator=torch.Generator().manual_seed(1))

    def once() -> list[Tensor]:
        torch.manual_seed(1)
        total = layer_norm(x, gain, offset, 1e-5) + bias_gelu(x, offset)
        total = bias_dropout_add(total, offset, x, dropout=0.2, training=True)
        loss = linear_cross_entropy(total, draw(40, 40), targets, torch.ones(90))
        return list(torch.autograd.grad(loss, [x, gain, offset]))

    assert all(torch.equal(first, other) for first, other in zip(once(), once(), strict=True))


def test_a_target_that_does_not_exist_gives_nan():
    """Nothing outside the logits is read, and the loss does not pass for one."""
    for bad in (-100, -1, 9, 2**40):
        loss = cross_entropy(torch.zeros(2, 9), torch.tensor([0, bad]))
        assert loss.isnan().tolist() == [False, True]
        assert linear_cross_entropy(
            torch.zeros(2, 3), torch.zeros(9, 3), torch.tensor([0, bad]), torch.ones(2)
        ).isnan()


def test_rows_too_long_for_registers_are_refused():
    """A row that no tile holds is an error with what to do, before anything is launched."""
    wide = WIDEST_NORM + 1
    with pytest.raises(LmcoreError, match=str(wide)) as error:
        layer_norm(torch.zeros(1, wide), torch.zeros(wide), torch.zeros(wide), 1e-5)
    assert "--ops" in error.value.hint
    wide = WIDEST_SOFTMAX + 1
    with pytest.raises(LmcoreError, match=str(wide)):
        scaled_masked_softmax(torch.zeros(1, 1, 1, wide), None, 1.0)


def test_a_mask_of_numbers_is_refused():
    """A mask says True or False; numbers could mean either."""
    with pytest.raises(LmcoreError, match="boolean"):
        scaled_masked_softmax(torch.zeros(1, 1, 2, 2), torch.zeros(2, 2), 1.0)


TOKENS, HIDDEN, VOCAB = 150, 7, 37


def head_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    target = torch.randint(VOCAB, (TOKENS,), generator=generator)
    share = torch.rand(TOKENS, generator=generator)
    share[::3] = 0.0
    return draw(TOKENS, HIDDEN, dtype=dtype), draw(VOCAB, HIDDEN, seed=1), target, share


@pytest.mark.parametrize(
    "rows",
    [pytest.param(1, marks=pytest.mark.full), 128, 150],
    ids=lambda rows: f"{rows} rows fit",
)
def test_blocks_of_tokens_add_up(rows, monkeypatch):
    """For any size of a block, loss and gradients are the reference's."""
    monkeypatch.setattr(head, "_BLOCK_BYTES", rows * VOCAB * 4)
    compare(linear_cross_entropy, head_inputs())


def test_blocks_are_alike_and_suit_products():
    """They are multiples of 128 tokens, about equal, and never more than there are."""
    assert head._block_rows(1000, VOCAB, 4, 500 * VOCAB * 4) == 512
    assert head._block_rows(100, VOCAB, 4, 10**9) == 100
    assert head._block_rows(16384, 50304, 2, 512 * 2**20) == 4096
    assert head._block_rows(300, VOCAB, 4, 1) == 128


@pytest.mark.parametrize("wanted", ["hidden", "weight", "none"])
def test_only_gradients_that_are_wanted_are_computed(wanted, monkeypatch):
    """A product whose result nobody asks for is not done."""
    hidden, weight, target, share = head_inputs()
    loss = reference.linear_cross_entropy(hidden, weight, target, share)
    wanted_grads = torch.autograd.grad(loss, [hidden, weight])
    hidden.requires_grad_(wanted == "hidden")
    weight.requires_grad_(wanted == "weight")
    if wanted != "weight":
        monkeypatch.delattr(head, "_add_product")
    found = linear_cross_entropy(hidden, weight, target, share)
    torch.testing.assert_close(found.detach(), loss.detach())
    if wanted == "none":
        assert not found.requires_grad
    else:
        (grad,) = torch.autograd.grad(found, [hidden if wanted == "hidden" else weight])
        torch.testing.assert_close(grad, wanted_grads[wanted == "weight"], rtol=1e-4, atol=1e-4)


def test_without_gradients_none_are_computed(monkeypatch):
    """In evaluation parameters still require gradients, and none is computed for them."""
    monkeypatch.delattr(head, "_add_product")
    with torch.no_grad():
        assert not linear_cross_entropy(*head_inputs()).requires_grad


def test_a_small_loss_weight_is_kept_in_float16():
    """Shares of a long batch's mean do not underflow, nor do the gradients of a scaled loss."""
    hidden, weight, target, share = head_inputs(torch.float16)
    weight, share = weight.detach().half().requires_grad_(), share * 1e-7
    loss = linear_cross_entropy(hidden, weight, target, share) * 2.0**20
    grads = torch.autograd.grad(loss, [hidden, weight])
    oracle = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    right = reference.linear_cross_entropy(*oracle, target, share.double()) * 2.0**20
    for found, wanted in zip(grads, torch.autograd.grad(right, oracle), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-4)


def test_weights_of_zero_give_zero():
    """Loss and gradients are zero and not NaN if no token counts."""
    hidden, weight, target, share = head_inputs()
    loss = linear_cross_entropy(hidden, weight, target, share * 0)
    assert loss.item() == 0.0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, [hidden, weight]))


def test_under_autocast_products_are_narrow_and_the_weights_gradient_is_not():
    """Hidden states of bfloat16 and weights of float32: each gradient has its input's dtype."""
    hidden, weight, target, share = head_inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, share)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert loss.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
    oracle = [tensor.detach().bfloat16().double().requires_grad_() for tensor in (hidden, weight)]
    right = reference.linear_cross_entropy(*oracle, target, share.double())
    torch.testing.assert_close(loss.double(), right, rtol=2e-2, atol=0)
    for found, wanted in zip(grads, torch.autograd.grad(right, oracle), strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(found.double(), wanted, rtol=4e-2, atol=4e-2 * scale)


@pytest.fixture
def benchmark():
    """The script that times the kernels."""
    return load("gpu_kernels", ROOT / "benchmarks/gpu_kernels.py")


def test_the_benchmark_measures_every_kernel(benchmark):
    """Its calls fit the ops, its contenders agree, and each kernel has a row with its ratios."""
    cpu = torch.device("cpu")
    rows = list(benchmark.measure(cpu, torch.bfloat16, ["tiny"], turns=1, compiled=False))
    assert [row.failed for row in rows] == [{}] * len(rows)
    assert {row.op for row in rows} == {impl.op for impl in op_impls("cpu")}
    assert all({"reference", "triton"} <= row.millis.keys() for row in rows)
    assert len(benchmark.table(rows).splitlines()) == 2 + len(rows)


def test_the_benchmark_does_not_time_what_is_wrong(benchmark, monkeypatch):
    """A kernel whose gradient is off is named, with how far off it is."""
    (call,) = (
        call
        for call in benchmark.calls(benchmark.SIZES["tiny"], torch.device("cpu"), torch.float32)
        if call.op == "swiglu"
    )
    monkeypatch.setattr("lmcore_triton.activation.swiglu", lambda x: 1.1 * swiglu(x))
    clock = benchmark.Clock(torch.device("cpu"))
    row = benchmark.measure_call(call, "tiny", clock, turns=1, compiled=False)
    assert row.failed.keys() == {"triton"}
    assert "off by" in row.failed["triton"]
    assert row.wins == (False, False)
