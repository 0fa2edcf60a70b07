"""Llama's and BLOOM's parts against a second model in numpy and float64, from their definitions."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

Array = npt.NDArray[np.float64]

_SPEC = importlib.util.spec_from_file_location(
    "float64_cases", Path(__file__).with_name("float64_cases.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
_CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CASES)
TOKENS, TARGETS, WEIGHTS = _CASES.TOKENS, _CASES.TARGETS, _CASES.WEIGHTS
parameters, weighted_loss = _CASES.parameters, _CASES.weighted_loss

POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])
ONE_DOCUMENT = np.zeros(TOKENS.shape)
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])

LLAMA: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}

BLOOM: dict[str, Any] = {"position_embedding_type": "alibi", "embed_layernorm": True}

# Each is a model of its own: the parts go together in any way.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "one-group": LLAMA | {"num_query_groups": 1, "add_qkv_bias": True},
    "wide-heads": LLAMA | {"head_dim": 6, "rotary_percent": 0.7, "rotary_base": 500},
    "scaled": LLAMA | {"rope_scaling_factor": 8.0, "rotary_base": 100_000_000, "head_dim": 12},
    "tied": LLAMA | {"untie_embeddings_and_output_weights": False, "num_query_groups": 6},
    "biases": LLAMA | {"add_bias_linear": True, "normalization": "LayerNorm"},
    "no-positions": LLAMA | {"position_embedding_type": "none"},
    "rotary-gpt": {"position_embedding_type": "rope", "num_attention_heads": 6},
    "gpt-without-biases": {"add_bias_linear": False},
    "grouped-gpt": {"num_attention_heads": 4, "num_query_groups": 2, "swiglu": True},
    "bloom": BLOOM,
    "grouped-bloom": BLOOM | {"num_attention_heads": 6, "num_query_groups": 2},
    "geglu": BLOOM | {"num_attention_heads": 4, "num_query_groups": 4, "glu_activation": "geglu"},
    "reglu": {"glu_activation": "reglu", "embed_layernorm": True},
    "liglu": LLAMA | {"swiglu": False, "glu_activation": "liglu"},
}


def normalized(x: Array, p: Mapping[str, Array], at: str, shape: ModelShape) -> Array:
    """Return x after the norm of a kind."""
    if shape.normalization == "RMSNorm":
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + shape.layernorm_epsilon)
        return x / scale * p[f"{at}.weight"]
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + shape.layernorm_epsilon)
    return centred / scale * p[f"{at}.weight"] + p[f"{at}.bias"]


def speed(pair: int, shape: ModelShape) -> float:
    """Return the angle of a pair of channels by position, as the papers have it."""
    angle = shape.rotary_base ** (-2 * pair / shape.rotary_dim)
    if shape.rope_scaling_factor == 1.0:
        return angle
    length = 2 * math.pi / angle
    if length < 8192 / 4:
        return angle
    if length > 8192:
        return angle / shape.rope_scaling_factor
    smooth = (8192 / length - 1) / (4 - 1)
    return (1 - smooth) * angle / shape.rope_scaling_factor + smooth * angle


def slope(head: int, shape: ModelShape) -> float:
    """Return a head's slope by the recursion of the paper's authors."""

    def slopes(heads: int) -> list[float]:
        if math.log2(heads).is_integer():
            first = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
            return [first**number for number in range(1, heads + 1)]
        lower = 2 ** int(math.log2(heads))
        return slopes(lower) + slopes(2 * lower)[::2][: heads - lower]

    return slopes(shape.num_attention_heads)[head]


def rotated(x: Array, position: int, shape: ModelShape) -> Array:
    """Return a head's channels as complex numbers rotated by their position."""
    if shape.position_embedding_type != "rope":
        return x
    half, out = shape.rotary_dim // 2, x.copy()
    for pair in range(half):
        number = complex(x[pair], x[pair + half]) * np.exp(1j * position * speed(pair, shape))
        out[pair], out[pair + half] = number.real, number.imag
    return out


def attended(
    x: Array, p: Mapping[str, Array], at: str, shape: ModelShape, positions: Array, documents: Array
) -> Array:
    """Return causal attention within documents, one position and head at a time."""
    batch, length, _ = x.shape
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    qkv = x @ p[f"{at}.qkv.weight"].T + p.get(f"{at}.qkv.bias", 0.0)
    cuts = [heads * width, (heads + groups) * width]
    q, k, v = (one.reshape(batch, length, -1, width) for one in np.split(qkv, cuts, axis=-1))
    for b, t in np.ndindex(batch, length):
        for one in (q, k):
            for head in range(one.shape[2]):
                one[b, t, head] = rotated(one[b, t, head], positions[b, t], shape)
    out = np.zeros((batch, length, heads, width))
    for b, t, h in np.ndindex(batch, length, heads):
        group = h // (heads // groups)
        seen = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
        scores = k[b, seen, group] @ q[b, t, h] / math.sqrt(width)
        if shape.position_embedding_type == "alibi":
            scores = scores + slope(h, shape) * np.array(seen)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, seen, group] / weights.sum()
    joined = out.reshape(batch, length, -1) @ p[f"{at}.output.weight"].T
    return joined + p.get(f"{at}.output_bias", 0.0)


def gated(x: Array, shape: ModelShape) -> Array:
    """Return the activation of a gate."""
    if shape.glu_activation == "reglu":
        return np.maximum(x, 0)
    if shape.glu_activation == "liglu":
        return x
    if shape.glu_activation == "geglu":
        return np.vectorize(lambda one: one * 0.5 * (1 + math.erf(one / math.sqrt(2))))(x)
    return x / (1 + np.exp(-x))


def fed_forward(x: Array, p: Mapping[str, Array], at: str, shape: ModelShape) -> Array:
    """Return the other branch."""
    up = x @ p[f"{at}.up.weight"].T
    if shape.swiglu or shape.glu_activation:
        gate, up = np.split(up + p.get(f"{at}.up.bias", 0.0), 2, axis=-1)
        inner = gated(gate, shape) * up
    else:
        up = up + p.get(f"{at}.up_bias", 0.0)
        inner = 0.5 * up * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (up + 0.044715 * up**3)))
    return inner @ p[f"{at}.down.weight"].T + p.get(f"{at}.down_bias", 0.0)


def logits_of(
    p: Mapping[str, Array],
    shape: ModelShape,
    positions: Array | None = None,
    documents: Array = ONE_DOCUMENT,
) -> Array:
    """Return the logits of TOKENS under the parameters *p*."""
    if positions is None:
        positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    x = p["token_embedding.weight"][TOKENS]
    if shape.embed_layernorm:
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + shape.layernorm_epsilon)
        x = x * p["embedding_norm.weight"] + p["embedding_norm.bias"]
    if "position_embedding.weight" in p:
        x = x + p["position_embedding.weight"][positions]
    for layer in range(shape.num_layers):
        at = f"blocks.{layer}"
        normal = normalized(x, p, f"{at}.attention_norm", shape)
        x = x + attended(normal, p, f"{at}.attention", shape, positions, documents)
        normal = normalized(x, p, f"{at}.feed_forward_norm", shape)
        x = x + fed_forward(normal, p, f"{at}.feed_forward", shape)
    rows = p.get("output_embedding.weight", p["token_embedding.weight"])
    return normalized(x, p, "final_norm", shape) @ rows.T


def loss_of(p: Mapping[str, Array], shape: ModelShape) -> float:
    """Return the weighted sum of the cross entropies of TARGETS."""
    return float(weighted_loss(logits_of(p, shape)))


MakeModel = Callable[..., GPT]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(make_model: MakeModel, name: str) -> None:
    """Float32 logits agree with the definition to rounding, in training and in evaluation."""
    model = make_model(**VARIANTS[name])
    expected = logits_of(parameters(model), model.shape)
    assert np.abs(expected).max() > 1
    for training in (True, False):
        with torch.no_grad():
            found = model.train(training).logits(model(torch.from_numpy(TOKENS))).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", ["llama", "wide-heads", "bloom"])
def test_places_of_its_own(make_model: MakeModel, name: str) -> None:
    """Positions that restart with each document, other ones in each sample, are rotated by."""
    model = make_model(masked=True, **VARIANTS[name]).eval()
    given = {
        "positions_BS": torch.from_numpy(POSITIONS),
        "documents_BS": torch.from_numpy(DOCUMENTS),
    }
    with torch.no_grad():
        found = model.logits(model(torch.from_numpy(TOKENS), **given)).numpy()
    values = parameters(model)
    expected = logits_of(values, model.shape, POSITIONS, DOCUMENTS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-4)
    assert np.abs(expected - logits_of(values, model.shape)).max() > 0.1


def test_float64_is_exact() -> None:
    """In float64 nothing is rounded to less, not even angles of large positions."""
    shape = ModelShape(2, 24, 3, 40, 12, 32, init_method_std=0.3)
    shape = dataclasses.replace(shape, **LLAMA, head_dim=4)
    model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float64")).double().eval()
    model.initialize(1)
    positions = 100_000 + POSITIONS
    with torch.no_grad():
        hidden = model(torch.from_numpy(TOKENS), positions_BS=torch.from_numpy(positions))
    expected = logits_of(parameters(model), shape, positions)
    np.testing.assert_allclose(model.logits(hidden).detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_gradient(make_model: MakeModel, name: str) -> None:
    """Each parameter's gradient predicts how the float64 loss changes along a random direction."""
    model = make_model(**VARIANTS[name])
    inputs = (torch.from_numpy(TOKENS), torch.from_numpy(TARGETS), torch.from_numpy(WEIGHTS))
    model.loss(inputs[0], inputs[1], inputs[2].float()).backward()
    base = parameters(model)
    generator = np.random.default_rng(5)
    step = 1e-6
    for one, parameter in model.named_parameters():
        assert parameter.grad is not None, one
        gradient = parameter.grad.double().numpy()
        direction = generator.standard_normal(gradient.shape)
        ahead = loss_of({**base, one: base[one] + step * direction}, model.shape)
        behind = loss_of({**base, one: base[one] - step * direction}, model.shape)
        slope = (ahead - behind) / (2 * step)
        scale = np.linalg.norm(gradient)
        assert scale > 1e-3, one
        assert abs((gradient * direction).sum() - slope) < 4e-4 * scale, one


@pytest.mark.parametrize("name", VARIANTS)
def test_cache(make_model: MakeModel, name: str) -> None:
    """Token by token, with keys and values of the groups alone, the logits are the same."""
    model = make_model(**VARIANTS[name]).eval()
    tokens = torch.from_numpy(TOKENS)
    cache = model.new_cache(torch.float32)
    cache.reserve(2, TOKENS.shape[1])
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(tokens[:, :3], cache.first_tokens([0, 1], 3))]
        later = range(3, TOKENS.shape[1])
        parts += [model(tokens[:, at : at + 1], cache.next_tokens([at, at])) for at in later]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_parameter_names() -> None:
    """A Llama has no biases, no positions, and an untied head."""
    with torch.device("meta"):
        shape = dataclasses.replace(ModelShape(1, 24, 6, 40, 12, 32), **LLAMA)
        model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {
        "token_embedding.weight": (32, 24),
        "blocks.0.attention_norm.weight": (24,),
        "blocks.0.attention.qkv.weight": (24 + 8 + 8, 24),
        "blocks.0.attention.output.weight": (24, 24),
        "blocks.0.feed_forward_norm.weight": (24,),
        "blocks.0.feed_forward.up.weight": (80, 24),
        "blocks.0.feed_forward.down.weight": (24, 40),
        "final_norm.weight": (24,),
        "output_embedding.weight": (32, 24),
    }
    assert not list(model.buffers())
