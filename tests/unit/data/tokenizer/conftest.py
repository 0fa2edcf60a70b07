"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

# ruff: noqa: RUF001  # letters that look alike are what is tested
_PIECES = """
[PAD] [UNK] [CLS] [SEP] [MASK] [unused1] the he ##llo hello wor ##ld ##s a b c ##a ##b ##c
is σ ς ##σ ##ς , . ! [ ] cls ' 漢 字 é e ## # ##é Hello T ##he I stan ##bul i ##stanbul
"""
WORDPIECES = tuple(dict.fromkeys(_PIECES.split()))

_TEXT = """the quick brown fox jumps over the lazy dog
she sells sea shells by the sea shore
çocuklar okula gitti ve evlerinden çıktılar
a b c d e f g h i j k l m n o p q r s t u v w x y z
0 1 2 3 4 5 6 7 8 9 , . ! ? < > _ / [ ] ( )"""
SENTENCES = tuple(_TEXT.splitlines())


@pytest.fixture(scope="session")
def wordpieces(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `vocab.txt` of a few words."""
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(WORDPIECES) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that trains a small SentencePiece model with given settings."""
    folder = tmp_path_factory.mktemp("models")

    def make(name: str, **settings: Any) -> str:
        path = folder / f"{name}.model"
        if not path.exists():
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(SENTENCES * 5),
                model_writer=model,
                minloglevel=2,
                num_threads=2,
                **{"vocab_size": 120, "hard_vocab_limit": False} | settings,
            )
            path.write_bytes(model.getvalue())
        return str(path)

    return make


@pytest.fixture(scope="session")
def t5_model(make_model: Callable[..., str]) -> str:
    """A unigram model with T5's ids: pad 0, eos 1, unk 2, no bos."""
    return make_model("t5", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="session")
def llama_model(make_model: Callable[..., str]) -> str:
    """A BPE model with Llama's ids: unk 0, bos 1, eos 2, no pad, bytes as the last resort."""
    return make_model(
        "llama",
        model_type="bpe",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        byte_fallback=True,
        vocab_size=400,
        normalization_rule_name="identity",
    )


@pytest.fixture(scope="session")
def bert_pipeline() -> Callable[[], tokenizers.Tokenizer]:
    """Return what makes a library's tokenizer as BERT has it: `[CLS]` first, `[SEP]` last."""
    return _bert_pipeline


@pytest.fixture(scope="session", params=["bert", "unigram"])
def pipeline(request: pytest.FixtureRequest) -> Callable[[], tokenizers.Tokenizer]:
    """Return what makes each of the library's tokenizers."""
    return {"bert": _bert_pipeline, "unigram": _unigram_pipeline}[request.param]


def _bert_pipeline() -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(WORDPIECES)}
    library = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return library


def _unigram_pipeline() -> tokenizers.Tokenizer:
    """Make a pipeline whose model has its special tokens as pieces, like converted models."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -5.0) for letter in "abcdesx<>/"]
    library = tokenizers.Tokenizer(models.Unigram(pieces, 2, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    library.add_special_tokens(
        [tokenizers.AddedToken(t, normalized=False) for t in ("<pad>", "</s>", "<unk>")]
    )
    return library


@pytest.fixture
def make_pretrained(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a library's tokenizer and configuration to a directory."""

    def make(
        library: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        *,
        special_map: dict[str, Any] | None = None,
    ) -> str:
        folder = tmp_path / "pretrained-source"
        folder.mkdir(exist_ok=True)
        library.save(str(folder / "tokenizer.json"))
        for name, values in (
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", special_map),
        ):
            if values is not None:
                (folder / name).write_text(json.dumps(values), encoding="utf-8")
        return str(folder)

    return make
