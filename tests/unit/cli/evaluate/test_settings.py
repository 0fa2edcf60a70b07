"""Options of a fine-tuning that follow from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmcore.checkpoint import save_checkpoint
from lmcore.cli.evaluate.section import EvaluateSection
from lmcore.cli.evaluate.settings import with_own_tokens
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer import tokenizer_from
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.model.shape import ModelShape
from lmcore.train.resume.foreign import ForeignModels

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "house")


@pytest.mark.parametrize(
    "rows,given,wanted", [(8, None, False), (10, None, None), (9, None, False), (8, True, True)]
)
def test_tokens_after_the_vocabulary(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    given: bool | None,
    wanted: bool | None,
) -> None:
    """`[BOS]` and `[EOS]` are left out for a model of another program without rows for them."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    described = SimpleNamespace(vocab_size=rows, tokenizer=None)
    monkeypatch.setattr(ForeignModels, "describe", lambda *_: described)
    section = EvaluateSection(
        vocab_file=str(tmp_path / "vocab.txt"),
        tokenizer_type="BertWordPieceLowerCase",
        add_special_tokens=given,
    )
    assert with_own_tokens(section, tmp_path).add_special_tokens is wanted


def test_the_same_tokens_in_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `tokenizer.json` of the checkpoint is used if a given `vocab.txt` has its tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    model = tokenizers.models.WordPiece(vocab=ids, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    own = TokenizerSettings("HuggingFaceTokenizer", tokenizer_name_or_path=str(tmp_path))
    described = SimpleNamespace(vocab_size=8, tokenizer=own)
    monkeypatch.setattr(ForeignModels, "describe", lambda *_: described)
    for last, left_out in {"house": True, "tree": False}.items():
        path = tmp_path / f"{last}.txt"
        path.write_text("\n".join([*VOCABULARY[:-1], last]) + "\n")
        section = EvaluateSection(vocab_file=str(path), tokenizer_type="BertWordPieceLowerCase")
        found = with_own_tokens(section, tmp_path)
        assert (found.vocab_file is None, found.tokenizer_type is None) == (left_out, left_out)


def test_the_same_tokens_in_the_copy_of_a_run(tmp_path: Path) -> None:
    """A run that was fine-tuned from such a checkpoint has its `tokenizer.json`."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    model = tokenizers.models.WordPiece(vocab=ids, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    own = tokenizer_from(
        TokenizerSettings("HuggingFaceTokenizer", tokenizer_name_or_path=str(tmp_path))
    )
    run = tmp_path / "run"
    run.mkdir()
    save_tokenizer(own, run / "tokenizer")
    shape = ModelShape(2, 24, 3, 8, 64, 384).to_dict()
    save_checkpoint(run / "checkpoints", 5, {"a": torch.zeros(1)}, {}, model_shape=shape)
    for last, left_out in {"house": True, "tree": False}.items():
        path = tmp_path / f"{last}.txt"
        path.write_text("\n".join([*VOCABULARY[:-1], last]) + "\n")
        section = EvaluateSection(vocab_file=str(path), tokenizer_type="BertWordPieceLowerCase")
        found = with_own_tokens(section, run)
        assert (found.vocab_file is None, found.tokenizer_type is None) == (left_out, left_out)
