"""Recompute policies: losses and gradients equal those without recomputation bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.contract import RecomputePolicy, full_policy, selective_policy
from lmcore.contract.recompute import Placement, remembering
from lmcore.families.gpt.model import GPT
from lmcore.families.recompute import KEEP_ALL, Recompute
from lmcore.plugin import create_device, discover, select

MakeModel = Callable[..., GPT]

TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3}


@pytest.fixture(scope="module")
def remember() -> Any:
    """Notes the host's random numbers, through the CPU plugin's device."""
    from lmcore.config.section import Config

    plugins = discover(env={"LMCORE_PLUGINS": ""})
    device = create_device(plugins, select(plugins, env={}), Config())
    return remembering(device.rng_tracker(), nullcontext)


@pytest.fixture
def under(remember: Any) -> Callable[..., Recompute]:
    """Factory of the recompute policy of a model."""

    def make(policy: RecomputePolicy, *placed: Any) -> Recompute:
        runs = [
            partial(run, remember=remember) if run is not None else None
            for run in (policy.block, policy.attention)
        ]
        return Recompute(*runs, placement=Placement(*placed))

    return make


def step(model: GPT, **limits: Tensor) -> dict[str, Tensor]:
    """Return loss, gradients and the next random numbers of one training pass."""
    model.train()
    torch.default_generator.manual_seed(3)
    loss = model.loss(TOKENS, TOKENS.roll(-1, dims=1), torch.ones(TOKENS.shape), **limits)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "drawn": torch.rand(4), **found}


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])

PLACED = [
    (full_policy, ()),
    (full_policy, ("uniform", 2)),
    (full_policy, ("uniform", 3)),
    (full_policy, ("block", 2)),
    (full_policy, ("block", 9)),
    (selective_policy, ()),
]


@pytest.mark.parametrize("policy, placed", PLACED)
@pytest.mark.parametrize("dropout", [{}, DROPOUT])
def test_same_numbers(
    make_model: MakeModel, under: Any, policy: Any, placed: Any, dropout: dict[str, float]
) -> None:
    """Loss, every gradient and the numbers drawn later are those without recomputation."""
    plain = step(make_model(num_layers=3, **dropout))
    found = step(make_model(num_layers=3, recompute=under(policy(), *placed), **dropout))
    for name, tensor in plain.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("policy, placed", PLACED)
def test_same_numbers_within_documents(
    make_model: MakeModel, under: Any, policy: Any, placed: Any
) -> None:
    """A recomputed layer attends to the same documents."""
    limits = {"documents_BS": DOCUMENTS, "positions_BS": DOCUMENTS}
    plain = step(make_model(num_layers=3, masked=True), **limits)
    model = make_model(num_layers=3, masked=True, recompute=under(policy(), *placed))
    found = step(model, **limits)
    assert not torch.equal(plain["loss"], step(make_model(num_layers=3))["loss"])
    for name, tensor in plain.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize(
    "placed, entered",
    [
        ((), [2, 2, 2, 2]),
        (("uniform", 2), [2, 2, 2, 2]),
        (("uniform", 4), [2, 2, 2, 2]),
        (("block", 3), [2, 2, 2, 1]),
    ],
)
def test_layers_are_entered_again(
    make_model: MakeModel, under: Any, placed: Any, entered: list[int]
) -> None:
    """A step enters a layer once, and twice where it is recomputed."""
    model = make_model(num_layers=4, recompute=under(full_policy(), *placed))
    calls = [0] * 4
    for index, block in enumerate(model.blocks.values()):

        def note(*_: Any, index: int = index) -> None:
            calls[index] += 1

        block.register_forward_pre_hook(note)
    step(model)
    assert calls == entered


@pytest.mark.parametrize(
    "placed, kept", [((), 8), (("uniform", 4), 2), (("uniform", 3), 3), (("block", 5), 5)]
)
def test_kept_inputs(make_model: MakeModel, remember: Any, placed: Any, kept: int) -> None:
    """Of 8 layers, uniform by 4 keeps 2 inputs and block 5 keeps 5, as upstream counts them."""
    groups: list[int] = []
    run = full_policy().block
    assert run is not None

    def counting(call: Any, x: Tensor) -> Tensor:
        groups.append(x.shape[0])
        return run(call, x, remember=remember)  # type: ignore[no-any-return]

    recompute = Recompute(counting, placement=Placement(*placed))
    step(make_model(num_layers=8, recompute=recompute))
    assert len(groups) == kept


def test_selective_recomputes_attention_alone(make_model: MakeModel, remember: Any) -> None:
    """The attention op runs twice in a step, and each projection once."""
    calls: list[str] = []
    run = selective_policy().attention
    assert run is not None
    model = make_model(recompute=Recompute(attention=partial(run, remember=remember)))
    for block in model.blocks.values():
        attention, plain = block.attention, block.attention.op

        def noting(*args: Any, plain: Any = plain, **options: Any) -> Tensor:
            calls.append("attention")
            return plain(*args, **options)  # type: ignore[no-any-return]

        attention.op = noting
        attention.qkv.register_forward_pre_hook(lambda *_: calls.append("qkv"))
    step(model)
    assert sorted(calls) == ["attention"] * 4 + ["qkv"] * 2


def test_only_in_training(make_model: MakeModel) -> None:
    """Evaluation and generation call layers and attention as they are."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("it ran outside of training")

    model = make_model(recompute=Recompute(refuse, refuse)).eval()
    plain = make_model(recompute=KEEP_ALL).eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
        model.train()
        cache = model.new_cache(torch.float32)
        cache.reserve(2, 7)
        model(TOKENS, cache.first_tokens([0, 1], 7))
