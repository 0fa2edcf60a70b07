"""A text as one stream: Megatron's windows and its perplexity of a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcore.data.tokenizer import ByteTokenizer
from lmcore.evaluation.requests import windows
from lmcore.evaluation.run import Evaluation
from lmcore.evaluation.tasks import TASKS
from lmcore.evaluation.tasks.language import wikitext_text
from lmcore.inference.load import LoadedModel

(TASK,) = (one for one in TASKS if one.name == "wikitext103_stream")
TEXT = " \n = One = \n \n A well @-@ known one , of 3 @.@ 5 m . It  is long . \n = = Part = = \n"


def upstream(tokens: list[int], length: int, overlap: int) -> list[tuple[list[int], list[int]]]:
    """Return inputs and scored targets of each window, as Megatron's data set makes them."""
    targets = len(tokens) - 1
    count = max(math.ceil(max(targets - overlap, 0) / overlap) + 1, 1)
    found = []
    for number in range(count):
        part = tokens[number * overlap : number * overlap + length + 1]
        mask = ([1] * len(part) + [0] * (length + 1 - len(part)))[1:]
        if number:
            mask[:-overlap] = [0] * (length - overlap)
        scored = [token for token, one in zip(part[1:], mask, strict=False) if one]
        found.append((part[:-1], scored))
    return [one for one in found if one[1]]


@pytest.mark.parametrize("count", [5, 17, 18, 40, 41, 44])
@pytest.mark.parametrize("overlap", [4, 7, 16])
def test_windows(count: int, overlap: int) -> None:
    tokens = list(range(100, 100 + count))
    found = list(windows(tokens, 16, overlap, even=True))
    expected = upstream(tokens, 16, overlap)
    assert [(list(one.inputs), list(one.targets)) for one in found] == expected
    assert [token for one in found for token in one.targets] == tokens[1:]


@pytest.mark.parametrize("length,stride", [(None, None), (16, None), (16, 5)])
def test_perplexity(
    loaded: Callable[..., LoadedModel], tmp_path: Path, length: int | None, stride: int | None
) -> None:
    """Against plain passes over Megatron's windows; 32 tokens is the usual stride."""
    model = loaded()
    (tmp_path / "wiki.test.tokens").write_text(TEXT)
    evaluation = Evaluation(model, tokens=2048, length=length, stride=stride)
    found = evaluation.score(evaluation.ask(TASK, [tmp_path / "wiki.test.tokens"])).metrics
    tokens = ByteTokenizer().encode(wikitext_text(TEXT))
    total = 0.0
    most = length or 32
    for inputs, targets in upstream(tokens, most, min(stride or 32, most)):
        with torch.no_grad():
            logits = model.model.logits(model.model(torch.tensor([inputs]))[0])[:, :257]
        own = torch.tensor(targets)
        total += torch.nn.functional.cross_entropy(
            logits[-len(targets) :], own, reduction="sum"
        ).item()
    loss = total / (len(tokens) - 1)
    words = len(TEXT.strip().split(" "))
    ratio = (len(tokens) - 1) / (words - 1)
    assert found["loss"].value == pytest.approx(loss, rel=1e-5)
    expected = math.exp(min(20, loss * ratio))
    assert found["adjusted_perplexity"].value == pytest.approx(expected, rel=1e-4)
