"""Neighbours of texts from a file: lines, chunks, padding, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.data.tokenizer import build_tokenizer
from lmcore.generation.text.neighbors import TextNeighbors, encode_neighbors, read_neighbors
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    ffn_hidden_size=8,
    max_position_embeddings=7,
    padded_vocab_size=260,
    model_family="retro",
    further=(
        ("retro_chunk_length", 2),
        ("retro_num_neighbors", 2),
        ("retro_num_retrieved_chunks", 2),
    ),
)


def read(folder: Path, text: str, prompts: int = 1) -> list[TextNeighbors]:
    (folder / "lines").write_text(text, encoding="utf-8")
    return read_neighbors(str(folder / "lines"), prompts)


def spelled(given: TextNeighbors) -> list[str]:
    """Return the tokens of each chunk as text, with a dot for padding."""
    tokens = encode_neighbors(build_tokenizer("ByteTokenizer"), given, SHAPE, 1)
    text = "".join("." if token < 0 else chr(token) for token in tokens)
    return [text[start : start + 8] for start in range(0, len(text), 8)]


def test_one_list_is_for_every_chunk(tmp_path: Path) -> None:
    """Long texts are cut, short ones filled; the model has positions for three chunks."""
    (given,) = read(tmp_path, '["abcdef", "xy"]\n')
    assert spelled(given) == ["abcdxy.."] * 3
    assert spelled(read(tmp_path, "[]")[0]) == ["........"] * 3


def test_a_list_for_each_chunk(tmp_path: Path) -> None:
    """A line has lists in the order of chunks; each prompt has a line."""
    first, second = read(tmp_path, '[["abc"], [], ["d", "efgh"]]\r\n[["x"]]', 2)
    assert spelled(first) == ["abc.....", "........", "d...efgh"]
    assert spelled(second) == ["x......."]


@pytest.mark.parametrize(
    "text, prompts, message",
    [
        ("", 1, "has 0 lines for 1 prompt"),
        ("[]\n[]\n", 1, "has 2 lines for 1 prompt"),
        ("[]\n{}\n", 2, "line 2 has no neighbours"),
        ('["a", ["b"]]', 1, "line 1 has no neighbours"),
        ('["a"', 1, "line 1 has no neighbours"),
        ("[[1]]", 1, "line 1 has no neighbours"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, prompts: int, message: str) -> None:
    """A line that is no list of texts, and another number of lines, is an error."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, prompts)
    assert message in caught.value.what


def test_no_such_file(tmp_path: Path) -> None:
    """It is named with its option."""
    with pytest.raises(ConfigError) as caught:
        read_neighbors(str(tmp_path / "none"), 1)
    assert "of `--retro-neighbors`" in caught.value.what


@pytest.mark.parametrize(
    "given, message",
    [
        (TextNeighbors((("a", "b", "c"),)), "prompt 1 has a chunk with 3 neighbours"),
        (TextNeighbors(((),) * 4), "prompt 1 has neighbours of 4 chunks, and the model positions"),
    ],
)
def test_more_than_the_model_reads(given: TextNeighbors, message: str) -> None:
    """More neighbours or chunks than the model has are refused, not cut."""
    with pytest.raises(ConfigError) as caught:
        spelled(given)
    assert message in caught.value.what
