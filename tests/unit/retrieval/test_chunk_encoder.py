"""Encoders of chunks: their vectors, one text at a time, and what is no encoder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmcore.base.errors import CheckpointError, MissingPackageError
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import build_tokenizer
from lmcore.families.bert.model import Bert
from lmcore.families.op_binding import OpBinding
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape
from lmcore.retrieval.chunk_encoder import (
    IctChunks,
    MeanOfStates,
    SentenceModel,
    load_chunk_encoder,
)
from lmcore.retrieval.encoder import TextEncoder

TEXTS = ["w1 w2 w3", "", "w4 " * 40, "w5 .", "w6 w7 w8 w9 w10"]


@pytest.fixture
def mean(vocabulary: Path) -> Callable[..., MeanOfStates]:
    """Makes an encoder of a BERT with random weights."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=str(vocabulary))
    own = {
        "bert_post_norm": False,
        "bert_gelu": "tanh",
        "bert_token_types": 2,
        "bert_binary_head": True,
    }

    def make(seed: int = 1, longest: int = 256) -> MeanOfStates:
        shape = ModelShape(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=32,
            max_position_embeddings=24,
            padded_vocab_size=tokenizer.vocab_size,
            init_method_std=0.3,
            model_family="bert",
            further=tuple(sorted(own.items())),
        )
        model = Bert(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
        model.initialize(seed)
        return MeanOfStates(model.eval(), tokenizer, PLAIN, Path("bert"), longest)

    return make


def test_the_mean_of_the_states(mean: Callable[..., MeanOfStates]) -> None:
    """A vector is the mean over a text's own tokens, whatever is computed together with it."""
    encoder = mean()
    model, tokenizer = encoder._model, encoder._tokenizer
    found = encoder.chunks(TEXTS, batch=3)
    assert found.shape == (len(TEXTS), encoder.size)
    for text, vector in zip(TEXTS, found, strict=True):
        ids = tokenizer.encode(text)[: 24 - 2]
        if not ids:
            np.testing.assert_array_equal(vector, 0)
            continue
        tokens = torch.tensor([[2, *ids, 3]])
        with torch.no_grad():
            hidden = model.hidden(tokens)[0, 1:-1]
        np.testing.assert_allclose(vector, hidden.mean(dim=0), atol=1e-6)
    np.testing.assert_array_equal(encoder.queries(TEXTS, batch=3), found)
    assert not encoder.inner_product


def test_the_longest_text(mean: Callable[..., MeanOfStates]) -> None:
    """Tokens beyond the length are left out, and the length is part of the fingerprint."""
    encoder = mean(longest=5)
    np.testing.assert_allclose(
        encoder.chunks(["w1 w2 w3 w4 w5"], batch=1), encoder.chunks(["w1 w2 w3"], batch=1)
    )
    prints = {mean(*one).fingerprint() for one in ((1, 5), (1, 6), (2, 5), (1, 5))}
    assert len(prints) == 3
    assert mean(1, 100).fingerprint() == mean(1, 24).fingerprint()


def test_questions_and_blocks(make_encoder: Callable[..., TextEncoder]) -> None:
    """ICT's question encoder looks for what its block encoder made."""
    inner = make_encoder()
    encoder = IctChunks(inner, 256)
    texts = [text for text in TEXTS if text]
    np.testing.assert_allclose(encoder.queries(texts, batch=2), inner.questions(texts), atol=1e-6)
    row = np.array([2, *inner.tokenizer.encode("w5 ."), 3])
    np.testing.assert_allclose(
        encoder.chunks(["w5 ."], batch=1), inner.blocks([row], batch=1), atol=1e-6
    )
    assert encoder.inner_product
    assert encoder.fingerprint() != IctChunks(make_encoder(2), 256).fingerprint()


class Sentences:
    """Replacement of the class of `sentence-transformers`."""

    def __init__(self, path: str, *, device: str, local_files_only: bool) -> None:
        assert local_files_only
        if not (Path(path) / "weights").exists():
            raise OSError("no weights")
        self.max_seq_length, self.device = 128, device

    def get_sentence_embedding_dimension(self) -> int:
        return 3

    def encode(self, texts: list[str], *, batch_size: int, **_: Any) -> Any:
        assert batch_size == 2
        return np.array([[len(text), 1, self.max_seq_length] for text in texts])


@pytest.fixture
def runtime() -> Any:
    return SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu")))


def test_a_model_of_sentences(runtime: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The directory of a model of the package is read by it."""
    module = SimpleNamespace(SentenceTransformer=Sentences)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no weights"):
        load_chunk_encoder(tmp_path, runtime, longest=64)
    (tmp_path / "weights").write_text("1")
    encoder = load_chunk_encoder(tmp_path, runtime, longest=64)
    assert isinstance(encoder, SentenceModel)
    found = encoder.chunks(["ab", "c"], batch=2)
    assert found.dtype == np.float32
    assert found.tolist() == [[2, 1, 64], [1, 1, 64]]
    before = encoder.fingerprint()
    assert before == load_chunk_encoder(tmp_path, runtime, longest=64).fingerprint()
    (tmp_path / "weights").write_text("2")
    assert before != load_chunk_encoder(tmp_path, runtime, longest=64).fingerprint()


def test_without_the_package(runtime: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The error names it and what installs it."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(MissingPackageError, match="pip install sentence-transformers"):
        load_chunk_encoder(tmp_path, runtime, longest=64)
