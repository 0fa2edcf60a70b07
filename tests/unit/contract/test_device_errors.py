"""Hints by the words of a device's errors."""

from __future__ import annotations

from lmcore.contract.device_errors import first_line, hint_by_words


def test_the_first_pattern_counts() -> None:
    """Patterns are asked in order, whatever the case; without one the doctor is named."""
    hints = (("lost|gone", "look for it"), ("lost", "never"))
    assert hint_by_words("Device LOST", hints) == "look for it"
    assert hint_by_words("broken", hints) == "run `lmcore doctor`"


def test_first_line() -> None:
    """Of several lines the first is reported, of an empty message its kind."""
    assert first_line(RuntimeError(" one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
