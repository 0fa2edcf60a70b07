"""The text at the end of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.layers.transformer import Attention
from lmcore.train.report.sample import generate_sample


@pytest.fixture
def sample(
    make_plan: Any, make_state: Any, make_datasets: Any, runtime: Any, tokenizer: Any
) -> Any:
    """Takes a sample from an untrained model."""

    def take(flags: str, prompt: str | None = None, kind: Any = tokenizer) -> Any:
        argv = flags.split() + ([] if prompt is None else ["--sample-prompt", prompt])
        plan = make_plan(" ".join(argv))
        datasets = dataclasses.replace(make_datasets(plan), tokenizer=kind)
        return generate_sample(make_state(plan).model, datasets, plan, runtime), datasets

    return take


def test_prompt_from_validation(sample: Any, tokenizer: Any) -> None:
    """By default the prompt opens a document that training does not see."""
    found, datasets = sample("--sample-tokens 5 --split 80,20,0 --eval-iters 1 --eval-interval 4")
    first = datasets.documents["valid"][0]
    document = datasets.indexed.get(int(datasets.indexed.document_indices[first]))
    assert found.prompt == tokenizer.decode(document[:2].tolist())  # an eighth of 16 positions
    assert found.text


def test_prompt_of_a_long_model(sample: Any, tokenizer: Any, monkeypatch: Any) -> None:
    """The prompt has a largest length, however many positions there are."""
    monkeypatch.setattr("lmcore.train.report.sample._LONGEST_PROMPT", 3)
    flags = "--sample-tokens 2 --split 80,20,0 --eval-iters 1 --eval-interval 4"
    found, datasets = sample(f"{flags} --max-position-embeddings 64")
    first = datasets.documents["valid"][0]
    document = datasets.indexed.get(int(datasets.indexed.document_indices[first]))
    assert found.prompt == tokenizer.decode(document[:3].tolist())


def test_own_prompt(sample: Any) -> None:
    """`--sample-prompt` is used; one longer than the positions loses its beginning."""
    found, _ = sample("--sample-tokens 3", "ROMEO:")
    assert found.prompt == "ROMEO:"
    found, _ = sample("--sample-tokens 3", "abcdefghijklmnopqrstuvwxyz")
    assert found.prompt == "lmnopqrstuvwxyz"


def test_rows_without_a_token_are_not_drawn(sample: Any) -> None:
    """A `--vocab-size` beyond the tokenizer's makes rows that no text has."""
    found, _ = sample("--sample-tokens 12 --vocab-size 4000", "A")
    assert found.text


class _Spaced(ByteTokenizer):
    """Tokenizer that writes a space between two tokens, as one of words does."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def test_the_text_joins_the_prompt(sample: Any) -> None:
    """The text begins with what its tokenizer writes between the prompt and it."""
    found, _ = sample("--sample-tokens 3", "A", _Spaced())
    assert found.prompt == "65"
    assert found.text.startswith(" ")


def test_same_seed_same_text(sample: Any) -> None:
    """The same run gives the same sample."""
    assert sample("--sample-tokens 6", "A")[0] == sample("--sample-tokens 6", "A")[0]


def test_numbers_drawn_meanwhile(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that draws random numbers also in evaluation does not disturb training."""
    drawn = []
    logits = GPT.logits

    def drawing(model: GPT, hidden_BSH: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(1))
        return logits(model, hidden_BSH)

    monkeypatch.setattr(GPT, "logits", drawing)
    sample("--sample-tokens 4", "A")
    after = torch.get_rng_state()
    monkeypatch.setattr(GPT, "logits", logits)
    sample("--sample-tokens 4", "A")
    assert len(drawn) == 4
    assert torch.equal(torch.get_rng_state(), after)


def test_new_tokens_attend_by_the_devices_kernel(
    make_plan: Any, make_state: Any, make_datasets: Any, runtime: Any
) -> None:
    """One that compiles for each shape needs it; the model can be trained afterwards."""
    lengths = []

    def attend(q_BND: Any, *_others: Any) -> Any:
        lengths.append(int(_others[-1]))
        return torch.zeros_like(q_BND)

    device = dataclasses.replace(runtime.device, next_token_attention=lambda *_: attend)
    plan = make_plan("--sample-tokens 4 --sample-prompt ab")
    model = make_state(plan).model
    own = dataclasses.replace(runtime, device=device)
    assert generate_sample(model, make_datasets(plan), plan, own)
    layers = [one for one in model.modules() if isinstance(one, Attention)]
    assert lengths == [length for length in (2, 3, 4) for _ in layers]
    assert all(layer.next_token is None for layer in layers)


def test_none(sample: Any) -> None:
    """No sample with `--sample-tokens 0`, with no prompt to start from, or for ids without text."""
    assert sample("--sample-tokens 0")[0] is None
    assert sample("--sample-tokens 3 --sample-prompt=")[0] is None
    null = build_tokenizer("NullTokenizer", vocab_file=None, merge_file=None, vocab_size=256)
    assert sample("--sample-tokens 3", kind=null)[0] is None


def test_one_position(sample: Any) -> None:
    """A model of one position has no room for a token after the prompt."""
    assert sample("--sample-tokens 3 --seq-length 1", "ab")[0] is None
