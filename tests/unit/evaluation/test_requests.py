"""Requests of examples: windows, the boundary between context and answer, what is too long."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from lmcore.base.errors import DataError
from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer
from lmcore.evaluation.likelihood import Scored
from lmcore.evaluation.requests import RequestMaker, windows
from lmcore.evaluation.task import Choices, Continued, Text


@pytest.mark.parametrize("stride", [1, 3, 7, 10])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 12, 31])
def test_windows_predict_each_token_once(count: int, stride: int) -> None:
    tokens = list(range(count + 1))
    found = list(windows(tokens, 10, stride))
    assert [token for one in found for token in one.targets] == tokens[1:]
    for one in found:
        assert len(one.inputs) == min(10, one.targets[-1])
        assert one.inputs == tuple(range(one.targets[-1] - len(one.inputs), one.targets[-1]))
    assert all(len(one.targets) <= stride for one in found[1:])


def test_windows_by_hand() -> None:
    """Eight tokens, four positions, two new ones a window."""
    found = list(windows([9, 1, 2, 3, 4, 5, 6, 7], 4, 2))
    assert found == [
        Scored((9,), (1, 2, 3, 4)),
        Scored((2, 3, 4), (5, 6)),
        Scored((3, 4, 5, 6), (7,)),
    ]


def maker(positions: int = 16) -> RequestMaker:
    return RequestMaker(ByteTokenizer(), positions, positions)


def ids(text: str) -> tuple[int, ...]:
    return tuple(ByteTokenizer().encode(text))


def test_tokens_around_a_text(tmp_path: Path) -> None:
    """The token that begins every text is there once, and the token that ends it is left out."""
    vocabulary = {"<s>": 0, "</s>": 1, "one": 2, "x": 3}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, "x"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    own = build_tokenizer("HuggingFaceTokenizer", tokenizer_name_or_path=str(tmp_path))
    assert own.encode("one x") == [0, 2, 3, 1]
    found = RequestMaker(own, 16, 16)
    assert found.of_text("one x") == [Scored((0,), (2, 3))]
    assert found.of(Choices(("one",), (" x",), 0)) == [Scored((0, 2), (3,))]
    assert found.of(Continued("one", " x", whole=False)) == [Scored((0, 2), (3,))]


def test_a_continuation_that_joins_the_context(tmp_path: Path) -> None:
    """A continuation that has no token after the context is encoded alone."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    own = build_tokenizer("HuggingFaceTokenizer", tokenizer_name_or_path=str(tmp_path))
    assert own.encode("ab") == [3, 2]
    assert RequestMaker(own, 16, 16).of_pair("a", "b") == Scored((3, 0), (1,))


def test_choices_have_one_context() -> None:
    found = maker().of(Choices(("Why?",), (" ab", " c"), 0))
    assert found == [Scored(ids("Why?"), ids(" ab")), Scored(ids("Why?"), ids(" c"))]


def test_spaces_of_the_context_belong_to_the_answer() -> None:
    (found, _) = maker().of(Choices(("Why? ",), ("ab", "c"), 0))
    assert found == Scored(ids("Why?"), ids(" ab"))


def test_last_token_or_last_word() -> None:
    (word,) = maker().of(Continued("a big", " dog"))
    assert word == Scored(ids("a big"), ids(" dog"))
    (token,) = maker().of(Continued("a big", " dog", whole=False))
    assert token == Scored(ids("a big do"), ids("g"))


def test_a_text_begins_with_the_end_of_documents() -> None:
    (found,) = maker().of(Text("hello", "hello"))
    assert found == Scored((ByteTokenizer().eod,), ids("hello"))
    assert maker().of(Text("", "")) == []


def test_long_contexts_lose_their_beginning() -> None:
    one = maker(8)
    (found,) = one.of(Continued("0123456789", "ab"))
    assert found == Scored(ids("3456789"), ids("ab"))
    assert (len(found.inputs), one.cut) == (8, 1)


def test_long_answers_are_refused() -> None:
    with pytest.raises(DataError, match="an answer has 9 tokens"):
        maker(8).of(Continued("a", "b" * 9))
    with pytest.raises(DataError, match="no tokens"):
        maker().of(Choices(("Why?",), ("", "b"), 0))
