"""Indexed data sets: the tokens of documents, and data of another tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data.indexed.metadata import commit
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.evaluation.indexed import indexed_task
from lmcore.evaluation.passes import Scored
from lmcore.evaluation.requests import RequestMaker
from lmcore.evaluation.run import evaluate
from lmcore.evaluation.task import Text, Tokens
from lmcore.inference.load import LoadedModel

TEXTS = ["It is a dog.", "All is well that ends well, and so on and so forth.", "no"]


def written(prefix: Path, documents: list[list[int]], tokenizer: ByteTokenizer | None) -> str:
    writer = IndexedDatasetWriter(str(prefix), np.dtype("uint16"))
    with closing(writer):
        for one in documents:
            writer.add_document(one)
        commit(writer, tokenizer or ByteTokenizer(), append_eod=True)
    if tokenizer is None:
        Path(f"{prefix}.meta.json").unlink()
    return str(prefix)


def test_the_loss_of_the_texts(loaded: Callable[..., LoadedModel], tmp_path: Path) -> None:
    """Each document is a text whose end-of-document token is predicted, too."""
    model, tokenizer = loaded(), ByteTokenizer()
    documents = [[*tokenizer.encode(one), tokenizer.eod] for one in TEXTS]
    prefix = written(tmp_path / "a", documents, tokenizer)
    found = evaluate(model, indexed_task(prefix), [Path(prefix)], tokens=2048, stride=16)
    assert found.count == 3
    maker = RequestMaker(tokenizer, 32, 16)
    total = count = 0.0
    from lmcore.evaluation.likelihood import Likelihoods

    for one in documents:
        for each in Likelihoods(model).of(maker.of(Tokens("it", one))):
            total, count = total + each.logprob, count + each.tokens
    assert count == sum(map(len, documents))
    assert found.metrics["loss"].value == pytest.approx(-total / count, rel=1e-12)
    assert set(found.metrics) == {"loss", "token_perplexity"}


def test_a_document_is_read_as_a_text() -> None:
    tokenizer = ByteTokenizer()
    maker = RequestMaker(tokenizer, 16, 4)
    tokens = tokenizer.encode(TEXTS[1])
    assert maker.of(Tokens("it", np.array(tokens))) == maker.of(Text(TEXTS[1], ""))
    # one that begins with the token before all documents
    assert maker.of(Tokens("it", [tokenizer.eod, *tokens[:2]])) == [
        Scored((tokenizer.eod,), tuple(tokens[:2]))
    ]
    assert maker.of(Tokens("it", [])) == []


def test_a_token_outside_the_vocabulary(loaded: Callable[..., LoadedModel], tmp_path: Path) -> None:
    prefix = written(tmp_path / "a", [[1, 2], [3, 300, 4]], None)
    with pytest.raises(DataError, match=r"document 1 of .* has the token 300") as caught:
        evaluate(loaded(), indexed_task(prefix), [Path(prefix)], tokens=2048)
    assert "257 tokens" in str(caught.value.why)


class Other(ByteTokenizer):
    """Tokenizer of another vocabulary, or of other files."""

    size = 300

    @property
    def vocab_size(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        return "other"


def test_data_of_another_tokenizer(
    loaded: Callable[..., LoadedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Other()
    prefix = written(tmp_path / "a", [[1, 2]], other)
    with pytest.raises(DataError, match="not prepared with the model's tokenizer"):
        evaluate(loaded(), indexed_task(prefix), [Path(prefix)], tokens=2048)
    other.size = ByteTokenizer().vocab_size
    prefix = written(tmp_path / "b", [[1, 2]], other)
    with caplog.at_level(logging.WARNING):
        evaluate(loaded(), indexed_task(prefix), [Path(prefix)], tokens=2048)
    assert "was prepared with other files of a tokenizer" in caplog.text


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        indexed_task(str(tmp_path / "a"))
