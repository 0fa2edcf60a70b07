"""Kernels that torch's compiler records once, on PJRT's CPU client; `tox -e xla` runs it."""

from __future__ import annotations

import pytest
import torch

from lmcore.contract.op import reference

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
SHAPES = ((4, 3), (5,))


def numbers(seed: int) -> list[torch.Tensor]:
    """Return tensors of the host."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(*shape, generator=generator) for shape in SHAPES]


def test_updates_are_the_references(device):
    """Every step has another learning rate, and only the first two steps compile."""
    from lmcore_xla.kernels import adamw

    right = [*map(numbers, range(4)), [torch.tensor(3.0), torch.tensor(0.0)]]
    found = [[one.to(device.torch_device) for one in part] for part in right]

    def step(lr: float) -> None:
        adamw(*found, lr=lr, **SETTINGS)
        device.step_boundary()
        reference.adamw(*right, lr=lr, **SETTINGS)

    step(0.1)
    step(0.3)
    before = device.compilations().count
    for lr in (0.2, 0.0, 1.0):
        step(lr)
    assert device.compilations().count == before
    for part, exact in zip(found, right, strict=True):
        for one, wanted in zip(part, exact, strict=True):
            assert torch.allclose(one.cpu(), wanted, rtol=1e-5)


def test_each_weight_has_its_count(device):
    """Also if the counts were made on the device; they differ if a weight was added later."""
    from lmcore_xla.kernels import adamw

    counts = (0.0, 1.0, 5.0)
    right = [[torch.full((3,), 0.5 + one) for one in counts] for _ in range(4)]
    found = [[one.to(device.torch_device) for one in part] for part in right]
    right.append([torch.tensor(one) for one in counts])
    found.append([torch.tensor(one, device=device.torch_device) for one in counts])
    for _ in range(2):
        adamw(*found, lr=0.1, **SETTINGS)
        device.step_boundary()
        reference.adamw(*right, lr=0.1, **SETTINGS)
    for part, exact in zip(found, right, strict=True):
        for one, wanted in zip(part, exact, strict=True):
            assert torch.allclose(one.cpu(), wanted, rtol=1e-5)


def test_many_weights_are_updated_by_several_programs(device):
    """Each part of 203 weights gets its own counts, and only the first two steps compile."""
    from lmcore_xla.kernels import adamw

    generator = torch.Generator().manual_seed(1)
    right = [[torch.rand(3, generator=generator) for _ in range(203)] for _ in range(4)]
    right.append([torch.tensor(float(number)) for number in range(203)])
    found = [[one.to(device.torch_device) for one in part] for part in right]
    counts = []
    for _ in range(3):
        adamw(*found, lr=0.1, **SETTINGS)
        device.step_boundary()
        reference.adamw(*right, lr=0.1, **SETTINGS)
        counts.append(device.compilations().count)
    assert counts[1] == counts[2]
    for part, exact in zip(found, right, strict=True):
        assert torch.allclose(torch.stack(part).cpu(), torch.stack(exact), rtol=1e-5)


def test_recorded_changes_of_arguments_are_run_before(device):
    """The program takes the memory of its arguments, which a view of them still needs."""
    from lmcore_xla.kernels import adamw, grad_norm

    found = [[one.to(device.torch_device) for one in numbers(seed)] for seed in range(4)]
    whole = [torch.ones(shape, device=device.torch_device) for shape in SHAPES]
    found[1] = [one.view(-1).view(one.shape) for one in whole]
    steps = [torch.zeros((), device=device.torch_device) for _ in SHAPES]
    device.step_boundary()
    torch._foreach_mul_(found[1], 2.0)
    assert grad_norm(found[1]).item() == pytest.approx(2 * (12 + 5) ** 0.5)
    torch._foreach_mul_(found[1], 0.5)
    adamw(*found, steps, lr=0.1, **SETTINGS)
    device.step_boundary()
    assert [one.sum().item() for one in whole] == [12.0, 5.0]


def test_random_numbers_do_not_depend_on_compilations(device):
    """A run that continues compiles where a run without a stop does not."""
    from lmcore_xla.kernels import grad_norm

    drawn = []
    for _ in range(3):
        grads = [torch.ones(7, device=device.torch_device)]
        device.step_boundary()
        device.seed(11)
        torch.rand(2, device=device.torch_device)
        grad_norm(grads)
        drawn.append(torch.rand(4, device=device.torch_device).tolist())
        device.step_boundary()
    assert drawn[0] == drawn[1] == drawn[2]
