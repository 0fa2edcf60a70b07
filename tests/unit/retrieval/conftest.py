"""Small encoders with random weights, and datasets of sentences about a word each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.cli.main import main
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import build_tokenizer
from lmcore.families.ict.model import Biencoder
from lmcore.families.op_binding import OpBinding
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape
from lmcore.retrieval.encoder import TextEncoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"w{n}" for n in range(90))]
DOCUMENTS = 20


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Path:
    """Return a folder with the datasets `d_text_sentence` and `d_title_document`."""
    folder = tmp_path_factory.mktemp("retrieval")
    with (folder / "d.jsonl").open("w") as file:
        for number in range(DOCUMENTS):
            lines = [f"w{number} w{40 + line} w{60 + line} ." for line in range(3 + number % 7)]
            file.write(json.dumps({"title": f"w{number}", "text": "\n".join(lines)}) + "\n")
    more = ["--input", f"{folder}/d.jsonl", "--output-prefix", f"{folder}/d", "--workers", "1"]
    more += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    assert main(["data", "prepare", *more, "--presplit-sentences"]) == 0
    assert main(["data", "prepare", *more, "--json-keys", "title"]) == 0
    return folder


@pytest.fixture
def make_encoder(vocabulary: Path) -> Callable[[int], TextEncoder]:
    """Makes an encoder of random weights from a seed."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=str(vocabulary))
    own = {
        "bert_post_norm": False,
        "bert_gelu": "tanh",
        "bert_token_types": 2,
        "biencoder_projection_dim": 6,
        "biencoder_shared_query_context_model": False,
        "retriever_score_scaling": False,
    }

    def make(seed: int = 1) -> TextEncoder:
        shape = ModelShape(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            ffn_hidden_size=32,
            max_position_embeddings=16,
            padded_vocab_size=len(WORDS),
            init_method_std=0.3,
            model_family="ict",
            further=tuple(sorted(own.items())),
        )
        model = Biencoder(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
        model.initialize(seed)
        return TextEncoder(model.eval(), tokenizer, PLAIN, Path("encoder"))

    return make
