"""Steps of checkpoints in messages."""

from __future__ import annotations

import pytest

from lmcore.config.checkpoint_step import steps_in_words


@pytest.mark.parametrize(
    "steps, others, expected",
    [
        ([4], [], "there is one checkpoint, of step 4"),
        ([], ["`release`"], "there is one checkpoint, `release`"),
        ([4], ["`release`"], "there are checkpoints of step 4 and `release`"),
        ([4, 8], [], "there are checkpoints of steps 4, 8"),
        (
            list(range(1, 22)),
            [],
            "there are checkpoints of 1 earlier one and steps " + ", ".join(map(str, range(2, 22))),
        ),
    ],
    ids=["one", "one name", "both", "two", "many"],
)
def test_which_checkpoints_there_are(steps: list[int], others: list[str], expected: str) -> None:
    """One is in the singular, and only the last of many are listed."""
    assert steps_in_words(steps, others) == expected
