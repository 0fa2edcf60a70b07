"""Shuffled documents: the same order for any memory, number of workers and interruption."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.prepare import partial_dataset
from lmcore.data.prepare.partial_dataset import shuffle_documents
from lmcore.data.prepare.run import PrepareRequest, prepare
from lmcore.data.prepare.sentences import SentenceOptions, build_splitter
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tools.inspect import inspect

DOCUMENTS = [
    {"text": f"{i}.\n" * (1 + i % 4) + "x" * (i % 97), "title": f"t{i}"} for i in range(500)
]


def write_input(folder: Path) -> tuple[str, ...]:
    paths = (folder / "1.jsonl", folder / "2.jsonl")
    for path, records in zip(paths, (DOCUMENTS[:200], DOCUMENTS[200:]), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tuple(map(str, paths))


def texts_of(prefix: Path) -> list[tuple[bytes, ...]]:
    """Return the text of each sequence, by document."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [
        tuple(bytes(dataset.get(i).tolist()) for i in range(start, end))
        for start, end in pairwise(bounds)
    ]


@pytest.mark.parametrize("sentences", [False, True])
def test_order_depends_on_the_seed_alone(tmp_path, sentences):
    """Whole documents move; workers do not matter, another seed does, and none keeps the order."""
    splitter = build_splitter(SentenceOptions(splitter="lines")) if sentences else None
    level = "sentence" if sentences else "document"
    inputs = write_input(tmp_path)

    def prepared(name: str, seed: int | None, workers: int) -> tuple[bytes, ...]:
        prepare(
            PrepareRequest(
                inputs,
                str(tmp_path / name),
                ByteTokenizer(),
                shuffle=seed,
                workers=workers,
                splitter=splitter,
            )
        )
        inspect(tmp_path / f"{name}_text_{level}", scan=True)
        paths = (tmp_path / f"{name}_text_{level}.{ending}" for ending in ("bin", "idx"))
        return tuple(path.read_bytes() for path in paths)

    first = prepared("a", 7, 1)
    assert prepared("b", 7, 2) == first
    assert prepared("c", 8, 1) != first
    assert prepared("d", None, 1) != first
    in_order, shuffled = (texts_of(tmp_path / f"{name}_text_{level}") for name in "da")
    assert sorted(shuffled) == sorted(in_order)
    places = [in_order.index(document) for document in shuffled[:60]]
    assert min(places) < 100
    assert max(places) > 400
    metadata = read_metadata(tmp_path / f"a_text_{level}")
    assert metadata is not None
    assert (metadata.input_files, metadata.shuffle) == (2, 7)


def test_order_does_not_depend_on_the_memory(tmp_path):
    """One pass over everything and one for every few documents write the same files."""
    numbers = np.random.default_rng(1)
    per_document = numbers.integers(1, 4, 3000).astype("<i4")
    lengths = numbers.integers(0, 9, int(per_document.sum())).astype("<i4")
    tokens = numbers.integers(0, 1 << 16, int(lengths.sum())).astype("<u2")
    source = [tmp_path / name for name in ("bin", "sizes", "documents")]
    for path, values in zip(source, (tokens, lengths, per_document), strict=True):
        path.write_bytes(values.tobytes())
    written = []
    for held in (1 << 30, 50_000, 3_000):
        target = [tmp_path / f"{path.name}-{held}" for path in source]
        shuffle_documents(source, target, token_bytes=2, seed=3, held_bytes=held)
        written.append([path.read_bytes() for path in target])
    assert written[0] == written[1] == written[2]
    assert [len(content) for content in written[0]] == [path.stat().st_size for path in source]
    assert written[0] != [path.read_bytes() for path in source]


def test_datasets_of_several_keys_stay_parallel(tmp_path):
    """Document N of each key's dataset comes from the same record."""
    request = PrepareRequest(
        write_input(tmp_path),
        str(tmp_path / "out"),
        ByteTokenizer(),
        json_keys=("text", "title"),
        shuffle=1,
    )
    prepare(request)
    texts, titles = (texts_of(tmp_path / f"out_{key}_document") for key in ("text", "title"))
    pairs = {(text[0], title[0]) for text, title in zip(texts, titles, strict=True)}
    records = {(one["text"].encode(), one["title"].encode()) for one in DOCUMENTS}
    assert pairs == records
    assert titles != [(one["title"].encode(),) for one in DOCUMENTS]


def test_a_run_that_fails_while_it_shuffles_is_resumed(tmp_path, monkeypatch):
    """The shards in the order of the input stay; the resumed run writes the same bytes."""
    inputs = write_input(tmp_path)
    whole, broken = (
        PrepareRequest(
            inputs,
            str(tmp_path / name),
            ByteTokenizer(),
            shuffle=5,
            shard_bytes=1 << 12,
            resume=True,
        )
        for name in ("whole", "broken")
    )
    prepare(whole)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partial_dataset, "shuffle_documents", full)
        with pytest.raises(DataError, match="No space left"):
            prepare(broken)
    assert not list((tmp_path / "broken.partial").glob("*shuffled*"))
    prepare(broken)
    for ending in ("bin", "idx"):
        same, right = (tmp_path / f"{name}_text_document.{ending}" for name in ("broken", "whole"))
        assert same.read_bytes() == right.read_bytes()


def test_hosts_cannot_shuffle_together(tmp_path):
    """Each host knows its own documents only, so that the flags exclude each other."""
    request = PrepareRequest(
        write_input(tmp_path),
        str(tmp_path / "out"),
        ByteTokenizer(),
        shuffle=1,
        partitions=2,
        partition=0,
    )
    with pytest.raises(ConfigError, match="`--shuffle` cannot be combined with `--partitions`"):
        prepare(request)
