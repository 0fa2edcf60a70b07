"""Heads for tasks: tables and modules, counts, losses by hand, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_states import drawn
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import ConfigError
from lmcore.families.build import create_model
from lmcore.families.op_binding import OpBinding
from lmcore.families.protocol import Model
from lmcore.model.family import families, family_of, parameter_shapes
from lmcore.model.parameters import parameter_count
from lmcore.model.shape import ModelPart, ModelShape

BERT = {
    "bert_binary_head": True,
    "bert_post_norm": False,
    "bert_gelu": "tanh",
    "bert_token_types": 2,
}
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
    init_method_std=0.3,
)
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}
SHAPES = {
    "gpt": SHAPE,
    "gpt-untied": replace(SHAPE, untie_embeddings_and_output_weights=True),
    "llama": replace(SHAPE, **LLAMA),
    **{
        name: replace(SHAPE, model_family="bert", further=tuple(sorted((BERT | own).items())))
        for name, own in {
            "bert": {},
            "bert-one-loss": {"bert_binary_head": False},
            "bert-original": {"bert_post_norm": True, "bert_gelu": "erf"},
        }.items()
    },
}
CLASSES = {"task": "classification", "num_labels": 3}
CHOICES = {"task": "multiple-choice", "num_labels": 2}
NUMBER = {"task": "regression", "num_labels": 1}


@pytest.fixture
def make(ops: OpBinding) -> Callable[..., Model]:
    """Makes a model with every parameter random."""

    def make(shape: ModelShape) -> Model:
        return drawn(create_model(shape, ops))

    return make


def batch_of(shape: ModelShape) -> dict[str, Tensor]:
    """Return four sequences, two with padding: four samples, or two with two choices."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 6, 4, 9])
    batch = {"tokens_BS": torch.randint(1, 32, (4, 9), generator=generator)}
    if shape.model_family == "bert":
        batch["types_BS"] = (torch.arange(9) > 4).long().expand(4, -1)
        batch["padding_BS"] = torch.arange(9) >= lengths[:, None]
        batch["pooled_B"] = torch.zeros(4, dtype=torch.long)
    else:
        batch["pooled_B"] = lengths - 1
    if shape.task == "classification":
        batch["label_Q"] = torch.tensor([2, 0, 1, 1])
        batch["label_weight_Q"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    elif shape.task == "regression":
        batch["label_Q"] = torch.tensor([2.5, -0.5, 9.0, 1.0])
        batch["label_weight_Q"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    else:
        batch["label_Q"] = torch.tensor([1, 0])
        batch["label_weight_Q"] = torch.ones(2)
        batch["choices_QC"] = torch.tensor([[True, True], [True, False]])
    return batch


@pytest.mark.parametrize("task", [CLASSES, CHOICES, NUMBER])
@pytest.mark.parametrize("name", SHAPES)
def test_table_and_modules(name: str, task: Any, ops: OpBinding) -> None:
    """The table has the names and shapes of the modules: the layers as before, and the head."""
    shape = replace(SHAPES[name], **task)
    with torch.device("meta"):
        model = create_model(shape, ops)
    modules = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameter_shapes(shape) == modules
    base = parameter_shapes(SHAPES[name])
    heads = {"output_embedding", "masked_head", "order_head", "pooler", "classifier"}
    body = {key: size for key, size in base.items() if key.partition(".")[0] not in heads}
    assert body.items() <= modules.items()
    own = {key: size for key, size in modules.items() if key not in body}
    rows = 3 if task is CLASSES else 1
    expected = {"classifier.weight": (rows, 24)}
    if name.startswith("bert"):
        expected |= {"pooler.weight": (24, 24), "pooler.bias": (24,), "classifier.bias": (rows,)}
    assert own == expected


def test_parameter_count() -> None:
    """BERT-base with two classes, as published: 109,483,778 parameters."""
    own = BERT | {"bert_post_norm": True, "bert_gelu": "erf"}
    shape = ModelShape(
        *(12, 768, 12, 3072, 512, 30522),
        model_family="bert",
        further=tuple(sorted(own.items())),
        task="classification",
        num_labels=2,
    )
    assert parameter_count(family_of(shape).parameters(shape)) == 109_483_778


def test_flops() -> None:
    """By hand: a block's, the pooled state's, and as many sequences as there are choices."""
    block = 5 * (2 * 24 * (4 * 24 + 2 * 40) + 4 * 5 * 24)
    shape = replace(SHAPES["bert"], **CLASSES)
    found = family_of(shape).forward_flops(shape, 5)
    assert (found.layers, found.rest) == (2 * block, 2 * 24 * (24 + 3))
    shape = replace(SHAPES["gpt"], **CHOICES)
    found = family_of(shape).forward_flops(shape, 5)
    assert (found.layers, found.rest) == (2 * 2 * block, 2 * 2 * 24)


def test_record() -> None:
    """It is named after family and task; one record for each, so that caches know it."""
    shape = replace(SHAPES["bert"], **CLASSES)
    record = family_of(shape)
    assert record is family_of(replace(shape, num_labels=7))
    assert (record.name, record.key) == ("BERT for classification", "bert")
    (loss,) = record.losses
    assert (loss.key, loss.accuracy_key) == ("classification_loss", "classification_accuracy")
    assert not record.names
    assert family_of(SHAPES["bert"]) is not record


def states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the hidden states after the last norm."""
    if model.shape.model_family == "bert":
        hidden: Tensor = model.hidden(*(batch[n] for n in ("tokens_BS", "types_BS", "padding_BS")))
        return hidden
    found: Tensor = model(batch["tokens_BS"])
    return found


@pytest.mark.parametrize("name", ["bert", "bert-original", "gpt", "llama"])
def test_classification(name: str, make: Callable[..., Model]) -> None:
    """Loss and accuracy by torch's functions of the pooled state; a weight of 0 leaves out."""
    model: Any = make(replace(SHAPES[name], **CLASSES))
    batch = batch_of(model.shape)
    hidden_BSH = states(model, batch)
    if name.startswith("bert"):
        pooled_BH = torch.tanh(functional.linear(hidden_BSH[:, 0], *model.pooler.parameters()))
    else:
        pooled_BH = hidden_BSH[torch.arange(4), torch.tensor([8, 5, 3, 8])]
    logits_BL = functional.linear(pooled_BH, *model.classifier.parameters())
    kept = torch.tensor([0, 1, 3])
    labels = batch["label_Q"][kept]
    wanted = functional.cross_entropy(logits_BL[kept], labels, reduction="sum")
    torch.testing.assert_close(model.loss(**batch), wanted)
    model.eval()
    with torch.no_grad():
        loss, right = model.loss(**batch)
    torch.testing.assert_close(loss, wanted)
    assert right == (logits_BL[kept].argmax(-1) == labels).sum()


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_multiple_choice(name: str, make: Callable[..., Model]) -> None:
    """The softmax is over the choices of a question; one that a question lacks has no share."""
    model: Any = make(replace(SHAPES[name], **CHOICES))
    batch = batch_of(model.shape)
    model.eval()
    with torch.no_grad():
        found = model.loss(**batch)
        scores_B1 = model.task_logits(states(model, batch), batch["pooled_B"])
        first = functional.cross_entropy(scores_B1[:2].T, torch.tensor([1]))
    assert scores_B1.shape == (4, 1)
    torch.testing.assert_close(found[0], first)  # of the second question, with one choice, 0
    assert found[1] == 1 + int(scores_B1[1] > scores_B1[0])
    changed = batch["tokens_BS"].clone()
    changed[3] = 7
    with torch.no_grad():
        torch.testing.assert_close(model.loss(**batch | {"tokens_BS": changed}), found)


@pytest.mark.parametrize("name", ["bert", "gpt", "llama"])
def test_regression(name: str, make: Callable[..., Model]) -> None:
    """The loss is the squared error of one number, without an accuracy; a weight of 0 leaves out.

    Without labels, the numbers are returned.
    """
    model: Any = make(replace(SHAPES[name], **NUMBER))
    assert not family_of(model.shape).accuracies
    batch = batch_of(model.shape)
    numbers_B = model.task_logits(states(model, batch), batch["pooled_B"])[:, 0]
    kept = torch.tensor([0, 1, 3])
    wanted = functional.mse_loss(numbers_B[kept], batch["label_Q"][kept], reduction="sum")
    torch.testing.assert_close(model.loss(**batch), wanted)
    torch.testing.assert_close(model.eval().loss(**batch), wanted)
    inputs = {key: value for key, value in batch.items() if not key.startswith("label")}
    torch.testing.assert_close(model.predictions(**inputs), numbers_B)


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_padding_is_not_seen(name: str, make: Callable[..., Model]) -> None:
    """Tokens after the end of a sequence do not change its loss."""
    model = make(replace(SHAPES[name], **CLASSES))
    batch = batch_of(model.shape)
    before = model.loss(**batch)
    tokens = batch["tokens_BS"].clone()
    tokens[1, 6:] = 13
    torch.testing.assert_close(model.loss(**batch | {"tokens_BS": tokens}), before)
    tokens[1, 5] = (tokens[1, 5] + 1) % 32
    assert model.loss(**batch | {"tokens_BS": tokens}) != before


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_last_stage_has_no_embedding(name: str, ops: OpBinding) -> None:
    """Without a language-model head the last stage of a pipeline needs no rows of tokens."""
    shape = replace(SHAPES[name], **CLASSES)
    model: Any = create_model(shape, ops, part=ModelPart((1,), embedding=False, head=True))
    assert not hasattr(model, "token_embedding")
    assert not model.tied_parameters
    stage = model.stage_modules(first=False, last=True)
    assert "classifier" in stage
    assert "token_embedding" not in stage


def test_family_without_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the reason."""
    monkeypatch.setitem(families(), "GPT", replace(families()["GPT"], body=None))
    with pytest.raises(ConfigError, match="`--task classification` is not supported by GPT"):
        family_of(replace(SHAPE, **CLASSES))
