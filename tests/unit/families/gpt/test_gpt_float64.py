"""The model against a second one, written in numpy and float64 from the definition of GPT-2."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmcore.families.gpt.model import GPT

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

EVERYTHING = np.zeros(TOKENS.shape)


def normalized(x: Array, gain: Array, offset: Array, epsilon: float) -> Array:
    """Mean 0 and variance 1 over the last axis, then gain and offset."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gain + offset


def attended(
    x: Array, p: Mapping[str, Array], at: str, heads: int, documents: Array = EVERYTHING
) -> Array:
    """Causal attention within documents, one position and head at a time."""
    batch, length, hidden = x.shape
    width = hidden // heads
    qkv = x @ p[f"{at}.qkv.weight"].T + p[f"{at}.qkv.bias"]
    q, k, v = (part.reshape(batch, length, heads, width) for part in np.split(qkv, 3, axis=-1))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(batch, length, heads):
        seen = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
        scores = k[b, seen, h] @ q[b, t, h] / math.sqrt(width)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v[b, seen, h] / weights.sum()
    return out.reshape(batch, length, hidden) @ p[f"{at}.output.weight"].T + p[f"{at}.output_bias"]


def fed_forward(x: Array, p: Mapping[str, Array], at: str) -> Array:
    """Up, GELU in its tanh form, down."""
    up = x @ p[f"{at}.up.weight"].T + p[f"{at}.up_bias"]
    gelu = 0.5 * up * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (up + 0.044715 * up**3)))
    return gelu @ p[f"{at}.down.weight"].T + p[f"{at}.down_bias"]


def logits_of(
    p: Mapping[str, Array],
    *,
    layers: int,
    heads: int,
    epsilon: float,
    positions: Array | None = None,
    documents: Array = EVERYTHING,
) -> Array:
    """Compute the scores of TOKENS under the parameters *p*."""
    positions = np.arange(TOKENS.shape[1]) if positions is None else positions
    x = p["token_embedding.weight"][TOKENS] + p["position_embedding.weight"][positions]
    for layer in range(layers):
        at = f"blocks.{layer}"
        norms = [
            (p[f"{at}.{name}_norm.weight"], p[f"{at}.{name}_norm.bias"])
            for name in ("attention", "feed_forward")
        ]
        x = x + attended(normalized(x, *norms[0], epsilon), p, f"{at}.attention", heads, documents)
        x = x + fed_forward(normalized(x, *norms[1], epsilon), p, f"{at}.feed_forward")
    x = normalized(x, p["final_norm.weight"], p["final_norm.bias"], epsilon)
    return x @ p["token_embedding.weight"].T


def loss_of(p: Mapping[str, Array], **shape: Any) -> float:
    """Weighted sum of the cross entropies of TARGETS."""
    return float(weighted_loss(logits_of(p, **shape)))


SHAPE = {"layers": 2, "heads": 3, "epsilon": 1e-5}


def test_logits(make_model: Callable[..., GPT]) -> None:
    """Float32 logits agree with the definition to rounding."""
    model = make_model().eval()
    with torch.no_grad():
        found = model.logits(model(torch.from_numpy(TOKENS))).numpy()
    expected = logits_of(parameters(model), **SHAPE)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("batch_axis", [1, 3])
def test_loss_is_the_weighted_sum(make_model: Callable[..., GPT], batch_axis: int) -> None:
    """The loss is the sum of loss_weight times cross entropy, for one row and for repeated rows."""
    model = make_model()
    rows = [torch.from_numpy(array).repeat(batch_axis, 1) for array in (TOKENS, TARGETS, WEIGHTS)]
    loss = model.loss(rows[0], rows[1], rows[2].float())
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    expected = batch_axis * loss_of(parameters(model), **SHAPE)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


DOCUMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("training", [False, True])
def test_documents_of_a_sample(
    make_model: Callable[..., GPT], positions: Array | None, training: bool
) -> None:
    """With a document-boundary mask, logits and loss equal the definition's."""
    model = make_model(masked=True).train(training)
    given = {"documents_BS": torch.from_numpy(DOCUMENTS)}
    if positions is not None:
        given["positions_BS"] = torch.from_numpy(positions)
    with torch.no_grad():
        found = model.logits(model(torch.from_numpy(TOKENS), **given)).numpy()
        rows = [torch.from_numpy(array) for array in (TOKENS, TARGETS, WEIGHTS)]
        loss = model.loss(rows[0], rows[1], rows[2].float(), **given)
    limits = {"documents": DOCUMENTS, "positions": positions}
    expected = logits_of(parameters(model), **SHAPE, **limits)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)
    assert loss.item() == pytest.approx(loss_of(parameters(model), **SHAPE, **limits), rel=1e-5)
    assert np.abs(expected - logits_of(parameters(model), **SHAPE)).max() > 0.1


def test_every_gradient(make_model: Callable[..., GPT]) -> None:
    """Each parameter's gradient predicts how the float64 loss changes along a random direction."""
    model = make_model()
    inputs = (torch.from_numpy(TOKENS), torch.from_numpy(TARGETS), torch.from_numpy(WEIGHTS))
    model.loss(inputs[0], inputs[1], inputs[2].float()).backward()
    base = parameters(model)
    generator = np.random.default_rng(5)
    step = 1e-6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.double().numpy()
        direction = generator.standard_normal(gradient.shape)
        ahead = loss_of({**base, name: base[name] + step * direction}, **SHAPE)
        behind = loss_of({**base, name: base[name] - step * direction}, **SHAPE)
        slope = (ahead - behind) / (2 * step)
        scale = np.linalg.norm(gradient)
        assert scale > 1e-3, name
        assert abs((gradient * direction).sum() - slope) < 2e-4 * scale, name
