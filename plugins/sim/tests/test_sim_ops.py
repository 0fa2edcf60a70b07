"""Ops of the device: the CPU's results on the device's memory, without a copy of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda x, y: x @ y,
    "in place": lambda x, y: x.clone().add_(y).mul_(2),
    "view and in place": lambda x, y: x.clone().view(-1)[3:].add_(1),
    "unfold": lambda x, y: x.unfold(0, 3, 2) * 2,
    "transposed": lambda x, y: x.t().contiguous() + y,
    "index": lambda x, y: x[[0, 2]],
    "mask": lambda x, y: x[y > 0],
    "several results": lambda x, y: torch.cat([*x.sort(dim=1), *y.topk(2)], dim=1),
    "list": lambda x, y: torch.cat([x, y]).chunk(3)[1],
    "foreach": lambda x, y: torch.stack(torch._foreach_add([x, y], 1.0)),
    "number": lambda x, y: torch.tensor(x.sum().item()),
    "factory": lambda x, y: torch.arange(4, device=x.device) * 2,
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y).conj() * 2),
    "norm": lambda x, y: functional.layer_norm(x, (8,), y[0], y[1]),
    "softmax": lambda x, y: functional.softmax(x, -1).log(),
    "convolution": lambda x, y: functional.conv1d(x[None], y[:, :, None], y[0]),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "expanded": lambda x, y: x[:1].expand(8, 8) + y,
    "empty": lambda x, y: x[:0].sum(0),
    "decomposition": lambda x, y: torch.linalg.svdvals(x),
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("name", OPS)
def test_results_are_those_of_the_cpu(sim: ModuleType, name: str) -> None:
    """An op gives the CPU's result on its own device, and leaves its arguments alone."""
    x, y = inputs()
    expected = OPS[name](x, y)
    on_device = [tensor.to("sim:1") for tensor in (x, y)]
    found = OPS[name](*on_device)
    if name != "number":
        assert found.device == torch.device("sim:1")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert found.stride() == expected.stride()
    for moved, two in zip(on_device, (x, y), strict=True):
        assert torch.equal(moved.cpu(), two)


@pytest.mark.parametrize("name", ["product", "unfold", "norm", "softmax", "convolution", "index"])
def test_gradients_are_those_of_the_cpu(sim: ModuleType, name: str) -> None:
    """The backward pass runs on the device, and gives the CPU's gradients."""
    x, y = inputs()
    gradients = []
    for device in ("cpu", "sim"):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in (x, y)]
        OPS[name](*leaves).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*gradients, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert found.device.type == "sim"
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("error")
def test_losses_are_those_of_the_cpu_without_a_warning(
    sim: ModuleType, name: str, reduction: str
) -> None:
    """Torch's own kernel for every backend resizes its scalar result, with a warning."""
    torch.set_warn_always(True)
    try:
        results = []
        for device in ("cpu", "sim"):
            x, y = (tensor.clone().to(device) for tensor in inputs())
            loss = getattr(functional, name)(x.requires_grad_(), y, reduction=reduction)
            loss.sum().backward()
            assert x.grad is not None
            results.append((loss.detach().cpu(), x.grad.cpu()))
        assert all(map(torch.equal, *results))
    finally:
        torch.set_warn_always(False)


def test_outputs_that_are_given_are_resized(sim: ModuleType) -> None:
    """A kernel may give the tensor that it writes to another size."""
    out = torch.empty(0, device="sim")
    torch.add(torch.ones(600, device="sim"), 1, out=out)
    assert out.sum().item() == 1200
    destination = torch.empty(0, dtype=torch.long, device="sim")
    torch.nonzero(torch.tensor([0.0, 1.0, 1.0], device="sim"), out=destination)
    assert destination.tolist() == [[1], [2]]


def test_views_share_memory(sim: ModuleType) -> None:
    """Values that are written through a view of any op are seen in its base."""
    base = torch.zeros(4, 4, device="sim")
    base.unfold(0, 2, 2).add_(1)
    base.view(16).view(torch.int32)[0] = 0
    base.diagonal()[1:].mul_(5)
    assert base.cpu().diagonal().tolist() == [0, 5, 5, 5]


def test_tensors_are_refilled_and_resized(sim: ModuleType) -> None:
    """`set_` and `resize_` work as on the CPU."""
    tensor = torch.arange(6.0, device="sim")
    other = torch.empty(0, device="sim").set_(tensor.untyped_storage(), 2, (2, 2), (2, 1))
    assert other.tolist() == [[2, 3], [4, 5]]
    tensor.resize_(10)[6:] = 7
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 7, 7]
    assert other.set_().numel() == 0


def test_devices_are_not_mixed(sim: ModuleType) -> None:
    """A tensor that was left on the CPU, or on another device, is an error as on hardware."""
    weight = torch.ones(2, 2, device="sim:0")
    for other in (torch.ones(2, 2), torch.ones(2, 2, device="sim:1")):
        with pytest.raises(RuntimeError, match="same device"):
            torch.mm(weight, other)
    with pytest.raises(RuntimeError, match="same device"):
        functional.embedding(torch.tensor([1]), weight)
    assert (weight * torch.tensor(3.0)).sum().item() == 12  # a number is no tensor
    assert weight[torch.tensor([0])].tolist() == [[1, 1]]  # and indices may be the CPU's


def test_lazy_conjugates_are_copied(sim: ModuleType) -> None:
    """A conjugate or a negation that is only noted is carried out by the copy."""
    x, y = inputs()
    conjugate = torch.complex(x, y).conj()
    lazy = torch.complex(x.to("sim"), y.to("sim")).conj()
    assert lazy.is_conj()
    assert torch.equal(lazy.cpu(), conjugate)
    assert torch.equal(lazy.imag.cpu(), conjugate.imag)


def test_autocast_casts(sim: ModuleType) -> None:
    """Products are in the lower precision, sums and norms in float32, float64 stays."""
    x = torch.randn(4, 4, device="sim")
    layer = torch.nn.Linear(4, 4).to("sim")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("sim", dtype=dtype):
            low = layer(x)
            assert low.dtype == (x @ x).dtype == dtype
            assert functional.layer_norm(low, (4,)).dtype == torch.float32
            assert low.softmax(-1).dtype == low.sum().dtype == low.norm().dtype == torch.float32
            assert torch.addcmul(x, low, low).dtype == torch.float32
            assert (low + low).dtype == dtype
            assert (x.double() @ x.double()).dtype == torch.float64
    assert layer(x).dtype == torch.float32
    torch.autograd.grad(low.float().sum(), layer.weight)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_optimizer_steps(sim: ModuleType, options: dict[str, Any]) -> None:
    """AdamW in each of its forms does the CPU's steps."""
    ends = []
    for device in ("cpu", "sim"):
        weight = torch.nn.Parameter(inputs()[0].to(device))
        optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        ends.append(weight.detach().cpu())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
