"""Text of a continuation that ends at a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.tokenizer import ByteTokenizer
from lmcore.generation.text.completion import Completion

BYTES = ByteTokenizer()


def take(text: str, stop: list[str]) -> tuple[list[str], Completion, int]:
    """Return the certain text after each token, the completion, and the tokens it took."""
    completion = Completion(BYTES, [], stop)
    seen, ids = [], list(text.encode())
    for count in range(1, len(ids) + 1):
        ended = completion.update(ids[:count])
        seen.append(completion.text)
        if ended:
            return seen, completion, count
    completion.finish(ids)
    return seen, completion, len(ids)


def test_no_stop() -> None:
    """All text is certain at once."""
    seen, completion, _ = take("abé", [])
    assert seen == ["a", "ab", "ab", "abé"]
    assert (completion.text, completion.stopped_by) == ("abé", None)


def test_stop() -> None:
    """A possible beginning of a stop text is held back; the stop text is not part of the text."""
    seen, completion, count = take("one\n\ntwo", ["\n\n"])
    assert seen == ["o", "on", "one", "one", "one"]
    assert (completion.text, completion.stopped_by, count) == ("one", "\n\n", 5)
    assert completion.finish(list(b"one\n\n")) == "one"


def test_a_start_that_is_no_stop() -> None:
    """Held-back text comes as soon as it is certain, and at the end."""
    seen, completion, _ = take("a\nb\n", ["\n\n"])
    assert seen == ["a", "a", "a\nb", "a\nb"]
    assert completion.text == "a\nb\n"


def test_the_first_of_several() -> None:
    """The earliest stop text ends it; of two at one place, any does."""
    assert take("xyz end", ["end", "yz"])[1].text == "x"
    assert take("stop", ["stop", "sto"])[1].text == ""


def test_several_tokens_at_once() -> None:
    """Tokens may come together."""
    completion = Completion(BYTES, [], ["!"])
    assert completion.update(list(b"yes! no"))
    assert completion.text == "yes"


@given(st.text(alphabet="abA\n", max_size=30), st.lists(st.text("abA\n", min_size=1, max_size=4)))
def test_equals_a_search_in_the_whole_text(text: str, stop: list[str]) -> None:
    """The text is cut where the whole text has the stop text that is complete first."""
    _, completion, count = take(text, stop)
    found = next(
        (
            text[:end][: min(text[:end].find(one) for one in stop if one in text[:end])]
            for end in range(1, len(text) + 1)
            if any(one in text[:end] for one in stop)
        ),
        text,
    )
    assert completion.text == found
    assert (count < len(text)) <= (completion.stopped_by is not None)


@pytest.mark.parametrize("stop", ["é", "漢字"])
def test_characters_of_several_bytes(stop: str) -> None:
    """A stop text is characters, not bytes."""
    assert take(f"na{stop}ve", [stop])[1].text == "na"
