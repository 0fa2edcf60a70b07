"""`Task`: the record of an evaluation task, and the examples that it may have.  Torch-free.

A task is data: where its files are, how a file becomes examples, and which metrics are reported.
How an example is scored follows from its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "Choices",
    "Continued",
    "Example",
    "Stream",
    "Streamed",
    "Task",
    "Text",
    "TextFile",
    "Tokens",
    "within",
]


@dataclass(frozen=True)
class Text:
    """Text whose tokens are all predicted, each from those before it.

    Attributes:
        text: The text that the model reads.
        original: Text whose words and bytes are counted, as it is in the file.
    """

    text: str
    original: str


@dataclass(frozen=True)
class Stream:
    """Text that is predicted as one stream, as Megatron does.

    The first token is not predicted; a window begins a stride after the window before, and the last
    one is shorter.

    Attributes:
        text: The text that the model reads.
        words: Number of words less one, which divides the log-probability.
        stride: Usual number of tokens that each window after the first predicts.
    """

    text: str
    words: int
    stride: int = 32


@dataclass(frozen=True)
class Tokens:
    """Document of token ids, which are all predicted, each from those before it.

    Attributes:
        place: Its name for messages.
        tokens: The ids.
    """

    place: str
    tokens: Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class TextFile:
    """File whose text is predicted as a `Text`, read in pieces since it may be large.

    Attributes:
        path: The file.
        pieces: Returns the pieces of its text, from the beginning.
    """

    path: Path
    pieces: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Continued:
    """Text with the end that the model has to predict.

    Attributes:
        context: Text before.
        continuation: The end, with the space between.
        whole: True if all tokens of the end count; False: the last one alone does, and the others
            are read as context.
    """

    context: str
    continuation: str
    whole: bool = True


@dataclass(frozen=True)
class Choices:
    """Question with several answers; the most probable one is the model's.

    Attributes:
        contexts: Text before each answer; one text, if it is the same before all.
        choices: The answers, with the space between.
        gold: Number of the right one, from 0.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int


Streamed = Text | TextFile | Stream | Tokens
Example = Streamed | Continued | Choices


@dataclass(frozen=True)
class Task:
    """Evaluation task.

    Attributes:
        name: Name for `--task`.
        summary: Line that says what it asks.
        files: Patterns of its files below the directory of the data; all files of the first pattern
            that has any are read, in the order of their names.
        examples: Yields the examples of one file.
        metrics: Names of the metrics, of `lmcore.evaluation.score`; the first is the main one.
        release: Origin of the files, for the message about missing ones.
    """

    name: str
    summary: str
    files: Sequence[str]
    examples: Callable[[Path], Iterator[Example]]
    metrics: Sequence[str]
    release: str


def within(pattern: str) -> tuple[str, ...]:
    """Return patterns of files that are in a directory, or in one or two directories inside.

    Args:
        pattern: Pattern of the files.
    """
    return (pattern, f"*/{pattern}", f"*/*/{pattern}")
