"""Tensors that stay in float32 while products are computed in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcore.contract import OP_SPECS, OpTable, autocast_policy
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore_cpu.device import create_device
from lmcore_cpu.kernels import KERNELS

SHAPE = ModelShape(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
)


@pytest.mark.parametrize("kernels", [(), KERNELS], ids=["reference", "cpu"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_float32_where_it_matters(name: str, dropout: float, kernels: Any) -> None:
    """Embeddings, the residual stream between blocks, weights, gradients and loss are float32."""
    shape = SHAPE.__class__(**(SHAPE.to_dict() | {"hidden_dropout": dropout}))
    model = GPT(shape, OpBinding(OpTable(OP_SPECS, kernels), "cpu", name))
    model.initialize(1)
    policy = autocast_policy(create_device(), name="half", compute=name, loss_scaling=True)
    policy.apply(model)
    seen: dict[str, set[torch.dtype]] = {}

    def note(where: str, tensor: torch.Tensor) -> None:
        seen.setdefault(where, set()).add(tensor.dtype)

    model.token_embedding.register_forward_hook(lambda *x: note("embedding", x[2]))
    model.final_norm.register_forward_pre_hook(lambda *x: note("stream", x[1][0]))
    for part in model.modules():
        kind = type(part).__name__
        if kind == "Block":
            part.register_forward_pre_hook(lambda *x: note("stream", x[1][0]))
            part.register_forward_hook(lambda *x: note("stream", x[2]))
            part.register_full_backward_hook(lambda *x: note("gradient of the stream", x[2][0]))
        elif kind == "Linear":
            part.register_forward_hook(lambda *x: note("products", x[2]))
    tokens = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    with policy.context():
        loss = model.loss(tokens, tokens, torch.full((2, 12), 1 / 24))
    loss.backward()
    note("loss", loss)
    for parameter in model.parameters():
        note("weights", parameter)
        assert parameter.grad is not None
        note("gradients", parameter.grad)
    half = {getattr(torch, name)}
    full = {torch.float32}
    assert seen == {
        **dict.fromkeys(("embedding", "stream", "gradient of the stream"), full),
        **dict.fromkeys(("loss", "weights", "gradients"), full),
        "products": half,
    }
