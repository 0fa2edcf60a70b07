"""Documents of several sequences: sizes, the end token, what is dropped."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.prepare.encode import encode_sentences
from lmcore.data.prepare.run import PrepareRequest, prepare
from lmcore.data.prepare.sentences import SentenceOptions, build_splitter
from lmcore.data.tokenizer import ByteTokenizer

LINES = build_splitter(SentenceOptions("lines"))
END = ByteTokenizer().eod


def prepared(tmp_path, texts, **options):
    """Return the dataset of texts whose sentences are lines."""
    lines = [json.dumps({"text": text, "title": "t\nu"}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    request = PrepareRequest(
        (str(tmp_path / "in.jsonl"),),
        str(tmp_path / "out"),
        ByteTokenizer(),
        overwrite=True,
        **options,
    )
    return prepare(request)


def test_three_sentences_are_three_sequences(tmp_path):
    """The reference's case: sizes by sentence, documents by text, the end on the last only."""
    report = prepared(
        tmp_path, ["ab\ncde\nf", "", "gh"], append_eod=True, splitter=LINES, json_keys=("text",)
    )
    (output,) = report.outputs
    assert output.prefix == f"{tmp_path}/out_text_sentence"
    assert (output.documents, output.empty, output.tokens) == (2, 1, 10)
    dataset = IndexedDataset(output.prefix)
    assert list(dataset.sizes) == [2, 3, 2, 3]
    assert list(dataset.document_indices) == [0, 3, 4]
    tokens = np.fromfile(f"{output.prefix}.bin", dtype=np.uint16).tolist()
    assert tokens == [*b"ab", *b"cde", *b"f", END, *b"gh", END]


def test_bytes_do_not_depend_on_workers(tmp_path):
    """One process and three write the same files, for every key."""
    texts = [f"{i}\nsecond line {i}\n\nthird" for i in range(300)]
    content = []
    for workers in (1, 3):
        report = prepared(
            tmp_path, texts, workers=workers, splitter=LINES, json_keys=("text", "title")
        )
        content.append(
            [
                Path(f"{output.prefix}.{ending}").read_bytes()
                for output in report.outputs
                for ending in ("bin", "idx")
            ]
        )
    assert content[0] == content[1]


class _Vowels:
    """Encodes vowels only, so that some sentences have no tokens."""

    def encode_batch(self, texts):
        return [np.array([ord(c) for c in text if c in "aeiou"], np.int32) for text in texts]


@pytest.mark.parametrize("end", [None, 7])
def test_sentences_without_tokens_are_dropped(end):
    """The end goes to the last sentence that has tokens, not to one that was dropped."""
    found = encode_sentences(["a\nx\nei\nz", "x\ny", "o\nx"], _Vowels(), LINES, end)
    last = [] if end is None else [end]
    expected = [[ord("a")], [ord("e"), ord("i"), *last], [ord("o"), *last]]
    assert found.tokens.tolist() == [*chain(*expected)]
    assert found.lengths.tolist() == [len(ids) for ids in expected]
    assert found.per_document.tolist() == [2, 1]
    assert found.empty == 1


def test_nothing_gives_nothing():
    """A batch without texts is no error."""
    found = encode_sentences([], _Vowels(), LINES, 7)
    assert (found.tokens.size, found.lengths.size, found.empty) == (0, 0, 0)
