"""Step `length`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.data.tokenizer import GPT2BPETokenizer
from lmcore_data_tools.clean.document import Document, Drop
from lmcore_data_tools.clean.filter.length import CharactersStep, TokensStep


def test_characters(make_document: Callable[..., Document]) -> None:
    """Characters count, not bytes."""
    step = CharactersStep(3)
    assert step.judge(make_document("äöü")) is None
    assert step.judge(make_document("äö")) == Drop("short", "2 characters")
    assert step.judge(make_document("ä")) == Drop("short", "1 character")


def test_tokens(make_document: Callable[..., Document], bpe_files: tuple[Path, Path]) -> None:
    """Tokens are the tokenizer's; eight characters for each are taken for enough, uncounted."""
    step = TokensStep(3, GPT2BPETokenizer(*map(str, bpe_files)))
    assert step.judge(make_document("hello world")) is None  # hello, " wor", "ld"
    assert step.judge(make_document("hellohello")) == Drop("short", "2 tokens")
    assert step.judge(make_document("hello")) == Drop("short", "1 token")
    assert step.judge(make_document("hello" * 5)) is None  # five tokens
    assert TokensStep(6, step._tokenizer).judge(make_document("hello" * 5)) is not None
    assert TokensStep(6, step._tokenizer).judge(make_document("hello" * 10)) is None
    assert step.judge(make_document("\ud800")) is None  # three bytes of U+FFFD


def test_tokens_without_tokenizer(corpus: Callable, run_steps: Callable) -> None:
    """Without a tokenizer there is no guess: it says what to give."""
    with pytest.raises(ConfigError, match="`--tokenizer-type` or `--min-characters`"):
        run_steps("length", corpus(["a"]))


def test_step(corpus: Callable, run_steps: Callable) -> None:
    """Short documents go, and the file of dropped ones has them whole."""
    done = run_steps("length", corpus(["long enough", "short"]), min_characters=6)
    assert done.texts == ["long enough"]
    assert done.dropped[0]["document"] == {"text": "short"}
    assert (done.dropped[0]["step"], done.dropped[0]["reason"]) == ("length", "short")
    assert (done.dropped[0]["line"], done.dropped[0]["detail"]) == (2, "5 characters")
