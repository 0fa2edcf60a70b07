"""The device on PJRT's CPU client: lazy, with its own generator; `tox -e xla` runs it."""

from __future__ import annotations

import subprocess
import sys

import torch


def compiled_by(device, function) -> int:
    """Return how many programs a function has compiled."""
    before = device.compilations().count
    function()
    return device.compilations().count - before


def test_a_boundary_runs_what_is_recorded(device):
    """The second step is the first one's program, since the boundary ended that."""

    def step() -> None:
        nonlocal tensor
        tensor = tensor * 3 + 17
        device.step_boundary()

    tensor = torch.ones(4, device=device.torch_device)
    device.step_boundary()
    assert compiled_by(device, step) == 1
    assert device.compilations().seconds > 0
    assert compiled_by(device, step) == 0
    assert tensor.tolist() == [77.0] * 4


def test_random_numbers_can_be_put_back(device):
    """Across boundaries too, which change torch_xla's own state."""
    device.seed(7)
    torch.rand(3, device=device.torch_device)
    state = device.get_rng_state()

    def draws() -> list[list[float]]:
        found = []
        for _ in range(2):
            found.append(torch.rand(4, device=device.torch_device).tolist())
            device.step_boundary()
        return found

    first = draws()
    device.set_rng_state(state)
    assert draws() == first
    assert first[0] != first[1]


def test_neither_reading_the_state_nor_a_boundary_changes_the_draws(device):
    """So that a checkpoint or recomputation in a step changes no later dropout."""

    def draws(between) -> list[list[float]]:
        device.seed(11)
        found = []
        for _ in range(3):
            numbers = torch.rand(4, device=device.torch_device)
            between()
            found.append((numbers + torch.rand(4, device=device.torch_device)).tolist())
            device.step_boundary()
        return found

    plain = draws(lambda: None)
    assert draws(device.get_rng_state) == plain
    assert draws(device.step_boundary) == plain
    assert draws(lambda: device.set_rng_state(device.get_rng_state())) == plain


def test_seeds_are_reduced_to_64_bits(device):
    device.seed(2**64 + 5)
    state = device.get_rng_state()
    device.seed(5)
    assert torch.equal(state, device.get_rng_state())
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")


def test_what_the_client_lacks_has_its_reason(device):
    assert device.memory_stats is None
    assert "counts no memory" in device.missing["memory_stats"]
    assert not device.inference_mode
    assert device.facts["pjrt_device"] == "CPU"


def test_attention_of_torch_follows_autocast(device):
    """With a mask of floats too; torch_xla casts the other products alone."""
    q, k, v = torch.randn(3, 1, 2, 4, 8, device=device.torch_device).unbind()
    attention = torch.nn.functional.scaled_dot_product_attention
    mask = torch.zeros(4, 4, device=device.torch_device)
    q.requires_grad_()
    with torch.autocast("xla", dtype=torch.bfloat16):
        found = [attention(q, k, v, is_causal=True), attention(q, k, v, mask, scale=0.5)]
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert {one.dtype for one in found} == {torch.bfloat16}
    found[0].sum().backward()
    assert q.grad.dtype == attention(q, k, v).dtype == torch.float32


def test_a_token_compiles_nothing_new(device):
    """The program of attention to the cache does not depend on the lengths of the texts."""
    attend = device.next_token_attention(torch.float32, 8)
    slots = torch.zeros(2, 2, 2, 32, 8, device=device.torch_device)

    def token(length: int) -> None:
        numbers = torch.randn(3, 2, 2, 8).to(device.torch_device)
        lengths = torch.tensor([length, length], device=device.torch_device)
        attend(*numbers.unbind(), *slots.unbind(), lengths, length).sum().item()
        device.step_boundary()

    token(1)
    token(2)
    assert compiled_by(device, lambda: [token(length) for length in (3, 7, 30)]) == 0


def test_log_and_path_stay_the_programs(pjrt):
    """torch_xla's import configures the root logger, and adds a directory of modules."""
    code = (
        "import logging, sys, torch\n"
        "from lmcore_xla.device import create_device\n"
        "from lmcore_xla.probe import probe, read_facts\n"
        "path = list(sys.path)\n"
        "create_device(probe(read_facts(), {'PJRT_DEVICE': 'CPU'}))\n"
        "print(logging.getLogger().handlers, sys.path == path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[] True\n"
