"""The model against the T5 of `transformers`, where that package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from suite.selection import peer
from torch import Tensor

from lmcore.families.t5.huggingface import ARCHITECTURES
from lmcore.families.t5.model import T5Model
from lmcore.generation.generate import generate_with_cache
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions

from .conftest import LATER, ORIGINAL

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

CASES = {
    "original": ORIGINAL,
    "1.1": LATER,
    "silu": LATER | {"t5_feed_forward": "gated-silu"},
    "gelu": ORIGINAL | {"t5_feed_forward": "gelu"},
}


def parts(model: T5Model) -> dict[str, tuple[str, slice]]:
    """Return our parameter, and its rows, for each name of transformers."""
    found = {}
    for name, parameter in model.named_parameters():
        foreign = ARCHITECTURES[0].tensors(name, model.shape)
        start = 0
        for other, rows in zip(foreign.names, foreign.rows or (parameter.shape[0],), strict=True):
            found[other] = (name, slice(start, start + rows))
            start += rows
    return found


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, make_t5: Callable[..., T5Model]) -> tuple[T5Model, Any]:
    """Our model and theirs with the same weights."""
    transformers = peer("transformers")
    ours = make_t5(**CASES[request.param])
    shape = ours.shape
    written = ARCHITECTURES[0].write(shape) | {"dropout_rate": 0.0}
    config = transformers.T5Config(
        vocab_size=shape.padded_vocab_size,
        tie_word_embeddings=shape.tied,
        decoder_start_token_id=0,
        **written,
    )
    theirs = transformers.T5ForConditionalGeneration(config)
    if not shape.tied:
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty_like(theirs.lm_head.weight))
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            own, rows = parts(ours)[name]
            parameter.copy_(values[own][rows])
    return ours, theirs


def answer(theirs: Any, batch: dict[str, Tensor]) -> Any:
    return theirs(
        input_ids=batch["tokens_BS"],
        attention_mask=(~batch["padding_BS"]).long(),
        decoder_input_ids=batch["decoder_tokens_BD"],
        labels=batch["targets_BD"].masked_fill(batch["loss_weight_BD"] == 0, -100),
    )


def test_logits(pair: tuple[T5Model, Any], batch: dict[str, Tensor]) -> None:
    """Logits of both stacks and the head agree, with padding and without."""
    ours, theirs = pair
    memory = ours.memory(batch["tokens_BS"], batch["padding_BS"])
    found = ours.logits(ours.hidden(batch["decoder_tokens_BD"], memory, batch["padding_BS"]))
    counted = batch["loss_weight_BD"] > 0
    torch.testing.assert_close(
        found[counted], answer(theirs, batch).logits[counted], rtol=1e-4, atol=1e-4
    )


def test_losses_and_gradients(pair: tuple[T5Model, Any], batch: dict[str, Tensor]) -> None:
    """The loss and the gradient of every parameter agree."""
    ours, theirs = pair
    loss = ours.loss(**batch) / batch["loss_weight_BD"].sum()
    expected = answer(theirs, batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    values = dict(ours.named_parameters())
    wanted = {name for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    assert len(wanted) >= len(values)
    for name, parameter in theirs.named_parameters():
        own, rows = parts(ours)[name]
        found, grad = values[own].grad, parameter.grad
        assert found is not None
        # Where terms cancel, rounding is a share of the largest gradient.
        atol = 1e-4 * float(grad.abs().max())
        torch.testing.assert_close(found[rows], grad, rtol=1e-4, atol=atol)


def test_greedy_generation(pair: tuple[T5Model, Any]) -> None:
    """Several requests together have the tokens of `generate`, one by one."""
    ours, theirs = (model.eval() for model in pair)
    drawn = torch.Generator().manual_seed(7)
    sources = [torch.randint(2, 32, (size,), generator=drawn).tolist() for size in (5, 9, 2, 7)]
    requests = [
        Request((0,), 10, SamplingOptions(greedy=True), stop_tokens=frozenset({1}), source=one)
        for one in sources
    ]
    found = generate_with_cache(ours, requests, vocab_size=32)
    for source, one in zip(sources, found, strict=True):
        with torch.no_grad():
            wanted = theirs.generate(
                torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=10,
                eos_token_id=1, pad_token_id=0, decoder_start_token_id=0, use_cache=False,
            )  # fmt: skip
        tokens = wanted[0, 1:].tolist()
        assert one.tokens == (tokens[: tokens.index(1)] if 1 in tokens else tokens)
