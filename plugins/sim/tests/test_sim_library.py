"""A user's loop on a device of a plugin, to which torch's `Module.to` does not move parameters."""

from __future__ import annotations

import torch
from torch import nn

import lmcore


class Tied(nn.Module):
    """Embedding and head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_kernels_under_a_model_of_the_host() -> None:
    """The model is moved: shared weights stay shared, and optimizers made before have them."""
    model = Tied()
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())]
    with lmcore.start(device="sim", precision="fp32") as rt:
        rt.use_kernels(model, optimizers[0])
        (weight,) = model.parameters()
        assert weight.device.type == "sim"
        assert model.head.weight is model.embedding.weight
        assert optimizers[0].param_groups[0]["params"][0] is weight
        rt.prepare(model, *optimizers)
        assert optimizers[1].param_groups[0]["params"][0] is weight
