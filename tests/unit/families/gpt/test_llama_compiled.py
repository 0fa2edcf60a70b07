"""Llama's parts in compiled blocks: traced whole, and the same numbers."""

from __future__ import annotations

import pytest
import torch

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    2,
    24,
    6,
    40,
    12,
    32,
    init_method_std=0.3,
    num_query_groups=2,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])


def model_of(*, compiled: bool) -> GPT:
    """Return a model on the references, its blocks traced for the compiler or not."""
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32", compile=compiled))
    model.initialize(1)
    for block in model.layers if compiled else []:
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_traced_whole() -> None:
    """A block compiles to one graph, with positions per sample or not, and the loss is the same."""
    for positions in (None, POSITIONS):
        losses, grads = [], []
        for compiled in (False, True):
            model = model_of(compiled=compiled)
            loss = model.loss(
                TOKENS, TOKENS.roll(-1, 1), torch.ones(TOKENS.shape), positions_BS=positions
            )
            loss.backward()
            losses.append(loss.detach())
            grads.append([one.grad for one in model.parameters()])
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
