"""AdamW in C++, for each instruction set of this processor, against torch's kernel and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lmcore.contract.op import reference, torch_kernels
from lmcore_cpu.kernel import native
from lmcore_cpu.kernel.adamw import adamw
from lmcore_cpu.kernel.processor import facts

SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
OTHERS = {"lr": 0.3, "beta1": 0.3, "beta2": 0.7, "epsilon": 0.2, "weight_decay": 0.9}
State = list[list[torch.Tensor]]


@pytest.fixture(params=("avx512_bf16", "avx512", "avx2"))
def instructions(request: pytest.FixtureRequest, give_facts: Callable[..., None]) -> str:
    """Each instruction set that this processor has kernels for."""
    if request.param not in facts().instructions:
        pytest.skip(f"no kernels for {request.param}: {native.reason()}")
    give_facts(instructions=(request.param,))
    return str(request.param)


def state_of(*sizes: tuple[int, ...]) -> State:
    """Return weights, gradients, moments and step counts."""
    generator = torch.Generator().manual_seed(1)

    def draw(scale: float) -> list[torch.Tensor]:
        return [torch.randn(size, generator=generator) * scale for size in sizes]

    squares = [tensor.square() for tensor in draw(1e-3)]
    counts = [torch.tensor(float(number)) for number in range(len(sizes))]
    return [draw(1), draw(1e-3), draw(1e-3), squares, counts]


def copy_of(state: State) -> State:
    return [[tensor.clone() for tensor in part] for part in state]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("settings", [SETTINGS, OTHERS], ids=["usual", "others"])
def test_the_bits_are_torchs(settings: dict[str, float]) -> None:
    """Steps have the bits of torch's fused kernel, where that uses vectors."""
    ours = state_of((64, 48), (16,), (3, 4096), (1 << 16,))
    theirs = copy_of(ours)
    for _ in range(3):
        adamw(*ours, **settings)
        torch_kernels.adamw(*theirs, **settings)
    for some, others in zip(ours, theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("settings", [SETTINGS, OTHERS], ids=["usual", "others"])
def test_any_size(settings: dict[str, float]) -> None:
    """Sizes that are no multiple of a vector, or empty, are as in float64."""
    ours = state_of((1,), (7, 3), (33,), (0,), (2 * 16384 + 5,))
    exact = [[tensor.double() for tensor in part] for part in copy_of(ours)]
    for _ in range(3):
        adamw(*ours, **settings)
        reference.adamw(*exact, **settings)
    for some, others in zip(ours, exact, strict=True):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=3e-6, atol=1e-8)


@pytest.mark.usefixtures("instructions")
def test_no_weights() -> None:
    """A step of a rank without weights does nothing."""
    adamw([], [], [], [], [], **SETTINGS)
    adamw([], [], [], [], [], **SETTINGS, results=([], [], []))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_does_not_depend_on_its_place(threads: int) -> None:
    """The parts of a weight have the bits of the whole: shards are updated as one process does."""
    whole = state_of((70_001,))
    count = whole[4]
    parts = copy_of(whole)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        adamw(*whole, **SETTINGS)
        for start, end in ((0, 13), (13, 30_000), (30_000, 70_001)):
            piece: Any = [[part[0][start:end]] for part in parts[:4]]
            adamw(*piece, [torch.zeros(())], **SETTINGS)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[:4], parts[:4], strict=True))
    assert count[0] == 1


@pytest.mark.usefixtures("instructions")
def test_results_in_other_memory(give_facts: Callable[..., None]) -> None:
    """Results go to other tensors, aligned or not, with the same bits; the old ones stay."""
    for shift in (0, 1):
        inside, outside = state_of((3, 4099), (16,)), state_of((3, 4099), (16,))
        before = copy_of(outside)
        new: Any = tuple(
            [torch.zeros(one.numel() + shift)[shift:].view(one.shape) for one in part]
            for part in (outside[0], *outside[2:4])
        )
        adamw(*inside, **SETTINGS)
        adamw(*outside, **SETTINGS, results=new)
        for some, others in zip(new, (inside[0], *inside[2:4]), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
        for some, others in zip(outside[:4], before[:4], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
    # Without compiled code torch's kernel does it, after a copy.
    give_facts(instructions=())
    state = copy_of(before)
    adamw(*state, **SETTINGS, results=new)
    assert all(torch.equal(one, other) for one, other in zip(new[1], inside[2], strict=True))
    for some, others in zip(state[:4], before[:4], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "without"])
def test_narrow_copies_and_the_factor_of_gradients(
    give_facts: Callable[..., None], compiled: bool
) -> None:
    """Copies are equal to a cast; the factor acts as a product with the gradients before."""
    plain, ours = state_of((3, 4099), (16,), (7,)), state_of((3, 4099), (16,), (7,))
    for gradient in plain[1]:
        gradient.mul_(0.37)
    if not compiled:
        give_facts(instructions=())
    before = copy_of(ours)
    new: Any = tuple([one.clone() for one in part] for part in (ours[0], *ours[2:4]))
    for results in (None, new):
        copies = [torch.empty(3, 4099).bfloat16(), None, torch.empty(7).bfloat16()]
        versions = [one._version for one in copies if one is not None]
        ours = copy_of(before)
        adamw(*ours, **SETTINGS, copies=copies, gradient_factor=0.37, results=results)
        written = results or (ours[0], *ours[2:4])
        once = copy_of(plain)
        torch_kernels.adamw(*once, **SETTINGS)
        exact = {"rtol": 0, "atol": 0} if not compiled else {"rtol": 2e-7, "atol": 1e-9}
        for some, others in zip(written, (once[0], *once[2:4]), strict=True):
            torch.testing.assert_close(some, others, **exact)
        for weight, copy in zip(written[0], copies, strict=True):
            assert copy is None or torch.equal(copy, weight.bfloat16())
        changed = [one._version for one in copies if one is not None]
        assert all(new > old for new, old in zip(changed, versions, strict=True))


@pytest.mark.usefixtures("instructions")
def test_what_torchs_kernel_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes and layouts, and only they, are left to torch's kernel."""
    calls: list[int] = []
    plain = torch_kernels.adamw
    monkeypatch.setattr(
        torch_kernels, "adamw", lambda *state, **named: calls.append(1) or plain(*state, **named)
    )
    usual = state_of((4, 4))
    usual[0] = [nn.Parameter(usual[0][0])]
    with torch.no_grad():
        adamw(*usual, **SETTINGS)
        assert not calls
        adamw(*[[tensor.double() for tensor in part] for part in state_of((4, 4))], **SETTINGS)
        transposed = state_of((4, 8))
        transposed[0] = [torch.ones(8, 4).t()]
        adamw(*transposed, **SETTINGS)
    assert len(calls) == 2


@pytest.mark.usefixtures("instructions")
def test_a_change_is_seen_by_torch() -> None:
    """Weights and moments count the change, as torch's own do: a copy in progress compares it."""
    state = state_of((4, 4))
    before = [part[0]._version for part in state]
    adamw(*state, **SETTINGS)
    changed = [part[0]._version > old for part, old in zip(state, before, strict=True)]
    assert changed == [True, False, True, True, True]
