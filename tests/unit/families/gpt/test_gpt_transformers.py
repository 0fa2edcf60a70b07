"""The model against the GPT-2 of `transformers`, where that package is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from suite.selection import peer

from lmcore.families.gpt.model import GPT

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])

# Their name -> ours; their projections are stored as (in, out).
NAMES = {
    r"transformer\.wte\.weight": "token_embedding.weight",
    r"transformer\.wpe\.weight": "position_embedding.weight",
    r"transformer\.ln_f\.(weight|bias)": r"final_norm.\1",
    r"transformer\.h\.(\d+)\.ln_1\.(weight|bias)": r"blocks.\1.attention_norm.\2",
    r"transformer\.h\.(\d+)\.ln_2\.(weight|bias)": r"blocks.\1.feed_forward_norm.\2",
    r"transformer\.h\.(\d+)\.attn\.c_attn\.(weight|bias)": r"blocks.\1.attention.qkv.\2",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.weight": r"blocks.\1.attention.output.weight",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.bias": r"blocks.\1.attention.output_bias",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.weight": r"blocks.\1.feed_forward.up.weight",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.bias": r"blocks.\1.feed_forward.up_bias",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.weight": r"blocks.\1.feed_forward.down.weight",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.bias": r"blocks.\1.feed_forward.down_bias",
}
TRANSPOSED = re.compile(r".*(c_attn|c_proj|c_fc)\.weight")


def our_name(theirs: str) -> str:
    """Return our name of one of their parameters."""
    for pattern, ours in NAMES.items():
        if match := re.fullmatch(pattern, theirs):
            return match.expand(ours)
    raise AssertionError(theirs)


def ours_from(theirs: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return their tensor in our layout."""
    return tensor.t() if TRANSPOSED.fullmatch(theirs) else tensor


@pytest.fixture
def pair(make_model: Callable[..., GPT]) -> tuple[GPT, Any]:
    """Our model and theirs with the same weights."""
    transformers = peer("transformers")
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=12,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_inner=40,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
    )
    ours = make_model()
    theirs = transformers.GPT2LMHeadModel(config)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours_from(name, parameters.pop(our_name(name))))
    assert not parameters
    return ours, theirs


def test_logits(pair: tuple[GPT, Any]) -> None:
    """Both give the same logits."""
    ours, theirs = pair
    with torch.no_grad():
        found = ours.eval().logits(ours(TOKENS))
        expected = theirs.eval()(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_loss_and_gradients(pair: tuple[GPT, Any]) -> None:
    """Both give the same mean loss over the shifted tokens, and the same gradients."""
    ours, theirs = pair
    weight = torch.full((2, 6), 1 / 12)
    loss = ours.loss(TOKENS[:, :-1], TOKENS[:, 1:], weight)
    expected = theirs(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        gradient = parameters[our_name(name)].grad
        wanted = ours_from(name, parameter.grad)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5, msg=name)
