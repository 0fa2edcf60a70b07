"""The model's Llama parts against the Llama of `transformers`, where that package is installed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from suite.selection import peer
from torch import Tensor

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.tensor([[3, 17, 4, 4, 29, 0, 8], [31, 1, 2, 30, 9, 9, 5]])
SHAPE = ModelShape(
    2,
    24,
    6,
    40,
    16384,
    32,
    layernorm_epsilon=1e-6,
    init_method_std=0.3,
    num_query_groups=2,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-groups": {"num_query_groups": 6},
    "tied": {"untie_embeddings_and_output_weights": False},
    "wide-heads": {"head_dim": 10, "rotary_base": 500_000},
    "scaled": {"head_dim": 32, "rotary_base": 500_000, "rope_scaling_factor": 8.0},
}

# Their name -> ours, and the rows of ours where several of theirs are one.
NAMES = {
    r"model\.embed_tokens\.weight": "token_embedding.weight",
    r"lm_head\.weight": "output_embedding.weight",
    r"model\.norm\.weight": "final_norm.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"blocks.\1.attention_norm.weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": (
        r"blocks.\1.feed_forward_norm.weight"
    ),
    r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj\.weight": r"blocks.\1.attention.qkv.weight",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"blocks.\1.attention.output.weight",
    r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.weight": r"blocks.\1.feed_forward.up.weight",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.weight": r"blocks.\1.feed_forward.down.weight",
}


def our_part(theirs: str, ours: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """Return the rows of ours that are one of theirs."""
    for pattern, name in NAMES.items():
        if match := re.fullmatch(pattern, theirs):
            whole = ours[match.expand(name)]
            break
    else:
        raise AssertionError(theirs)
    q, k, f = shape.attention_size, shape.key_size, shape.ffn_hidden_size
    rows = {
        "q_proj": slice(0, q),
        "k_proj": slice(q, q + k),
        "v_proj": slice(q + k, q + 2 * k),
        "gate_proj": slice(0, f),
        "up_proj": slice(f, 2 * f),
    }
    return whole[rows.get(theirs.split(".")[-2], slice(None))]


def theirs_of(shape: ModelShape) -> Any:
    """Return their model of a shape."""
    transformers = peer("transformers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(shape.rotary_base)}
    if shape.rope_scaling_factor != 1.0:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.layernorm_epsilon,
        rope_parameters=rope,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(params=CHANGES)
def pair(request: pytest.FixtureRequest) -> tuple[GPT, Any]:
    """Our model and theirs with the same weights."""
    shape = dataclasses.replace(SHAPE, **CHANGES[request.param])
    theirs = theirs_of(shape)
    ours = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    ours.initialize(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
        parameters = dict(ours.named_parameters())
        filled = 0
        for name, parameter in theirs.named_parameters():
            part = our_part(name, parameters, shape)
            parameter.copy_(part)
            filled += part.numel()
    assert filled == ours.parameter_count()
    return ours, theirs


@pytest.mark.parametrize("first", [0, 9000])
def test_logits(pair: tuple[GPT, Any], first: int) -> None:
    """Both give the same logits, at large positions as far as angles are exact in float32."""
    ours, theirs = pair
    positions = torch.arange(first, first + TOKENS.shape[1]).expand(TOKENS.shape)
    with torch.no_grad():
        found = ours.eval().logits(ours(TOKENS, positions_BS=positions))
        expected = theirs.eval()(TOKENS, position_ids=positions).logits
    limit = 1e-4 if first == 0 else 2e-3
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def test_loss_and_gradients(pair: tuple[GPT, Any]) -> None:
    """Both give the same mean loss over the shifted tokens, and the same gradients."""
    ours, theirs = pair
    weight = torch.full((2, 6), 1 / 12)
    loss = ours.loss(TOKENS[:, :-1], TOKENS[:, 1:], weight)
    expected = theirs(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    grads = {name: one.grad for name, one in ours.named_parameters() if one.grad is not None}
    for name, parameter in theirs.named_parameters():
        found = our_part(name, grads, ours.shape)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
