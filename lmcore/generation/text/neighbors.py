"""Neighbours of the texts to generate, from a file; torch-free.

A line is a JSON list, of texts or of lists of texts:

    ["a neighbour of every chunk", "another one"]
    [["a neighbour of the first chunk"], [], ["one of the third", "another one"]]

Chunks are counted from the first token of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, counted
from lmcore.generation.text.prompt import encode_prompt, read_lines

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["TextNeighbors", "encode_neighbors", "read_neighbors"]

_PADDING = -1


@dataclass(frozen=True)
class TextNeighbors:
    """Neighbours of one text.

    Attributes:
        chunks: Texts for each chunk; chunks after the last have none.
        of_all: True if there is one such list, for every chunk.
    """

    chunks: tuple[tuple[str, ...], ...]
    of_all: bool = False


def read_neighbors(path: str, num_prompts: int) -> list[TextNeighbors]:
    """Return the neighbours of each prompt.

    Args:
        path: Path of the file.
        num_prompts: Number of prompts.

    Raises:
        ConfigError: The file cannot be read, a line is no such list, or there are not as many lines
            as prompts.
    """
    lines = read_lines(path, "the file `{}` of `--retro-neighbors`")
    if len(lines) != num_prompts:
        raise ConfigError(
            f"`{path}` has {counted(len(lines), 'line')} for {counted(num_prompts, 'prompt')}",
            why="each line has the neighbours of one prompt",
            hint="write `[]` on the line of a prompt without neighbours",
        )
    return [_line(line, f"`{path}` line {number}") for number, line in enumerate(lines, start=1)]


def _line(line: str, name: str) -> TextNeighbors:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_list(name, str(error)) from None
    if _is_texts(found):
        return TextNeighbors((tuple(found),), of_all=True)
    if isinstance(found, list) and all(_is_texts(one) for one in found):
        return TextNeighbors(tuple(tuple(one) for one in found))
    raise _no_list(name, "")


def _no_list(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} has no neighbours",
        why=why or "it is another JSON value",
        hint='write `["text", "text"]` for all chunks of a text, or `[["text"], [], ["text"]]` '
        "with a list for each chunk",
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def encode_neighbors(
    tokenizer: Tokenizer, neighbors: TextNeighbors, shape: ModelShape, number: int
) -> tuple[int, ...]:
    """Return the tokens of the neighbours of each chunk, one after another; -1: padding.

    A text with more tokens than the model was trained to read is cut.

    Args:
        tokenizer: Tokenizer of the model.
        neighbors: The neighbours.
        shape: Sizes of a Retro model.
        number: Number of the prompt, for messages.

    Raises:
        ConfigError: A chunk has more neighbours than the model reads, or there are more chunks than
            it has positions for.
    """
    chunk, most = shape.own["retro_chunk_length"], shape.own["retro_num_neighbors"]
    read, room = (
        chunk * shape.own["retro_num_retrieved_chunks"],
        (shape.max_position_embeddings // chunk),
    )
    if len(neighbors.chunks) > room:
        raise ConfigError(
            f"prompt {number} has neighbours of {len(neighbors.chunks)} chunks, and the model "
            f"positions for {room}",
            why=f"a chunk has {chunk} tokens",
            hint="give fewer lists",
        )
    rows = []
    for texts in neighbors.chunks:
        if len(texts) > most:
            raise ConfigError(
                f"prompt {number} has a chunk with {len(texts)} neighbours",
                why=f"the model was trained to read {most}",
                hint="give the most similar ones",
            )
        row: list[int] = []
        for text in texts:
            row += _filled(encode_prompt(tokenizer, text), read)
        rows.append(_filled(row, most * read))
    if neighbors.of_all:
        rows *= room
    return tuple(token for row in rows for token in row)


def _filled(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens[:length], *[_PADDING] * (length - len(tokens))]
