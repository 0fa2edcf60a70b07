"""Document-boundary mask: the model computes each document of a sample as if it were alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.families.gpt.model import GPT

EOD = 31
TOKENS = torch.tensor([[3, 17, EOD, 4, 29, 0, 8, EOD, 2, 9], [1, EOD, EOD, 30, 9, 9, 5, 6, 7, EOD]])
TARGETS = TOKENS.roll(-1, dims=1)
MASKS = DocumentMasks(EOD, reset_position_ids=True, reset_attention_mask=True)


def limits() -> dict[str, Tensor]:
    positions_BS, documents_BS = MASKS.positions(TOKENS), MASKS.documents(TOKENS)
    assert positions_BS is not None
    assert documents_BS is not None
    return {"positions_BS": positions_BS, "documents_BS": documents_BS}


def documents() -> list[tuple[int, slice]]:
    """Return row and slice of each document."""
    found = []
    for row, tokens in enumerate(TOKENS.tolist()):
        start = 0
        for place, token in enumerate(tokens):
            if token == EOD or place == len(tokens) - 1:
                found.append((row, slice(start, place + 1)))
                start = place + 1
    return found


def test_each_document_as_if_alone(make_model: Callable[..., GPT]) -> None:
    """Hidden states match each document by itself."""
    model = make_model(masked=True).eval()
    with torch.no_grad():
        found = model(TOKENS, **limits())
        for row, place in documents():
            alone = model(TOKENS[row : row + 1, place])
            torch.testing.assert_close(found[row, place], alone[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_documents_alone(make_model: Callable[..., GPT]) -> None:
    """Gradients of a sample are the sum of its documents' gradients."""
    together, apart = make_model(masked=True), make_model()
    together.loss(TOKENS, TARGETS, torch.ones(TOKENS.shape), **limits()).backward()
    for row, place in documents():
        pair = (TOKENS[row : row + 1, place], TARGETS[row : row + 1, place])
        apart.loss(*pair, torch.ones(pair[0].shape)).backward()
    expected = dict(apart.named_parameters())
    for name, parameter in together.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4, msg=name
        )


def test_mask_without_its_kernel(make_model: Callable[..., GPT]) -> None:
    """A model whose attention was bound without a mask refuses one."""
    with pytest.raises(AssertionError, match="bound without a mask"):
        make_model()(TOKENS, **limits())
