"""`lmcore generate --fill-mask`, from flags to the tokens of each mask."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from model_states import GPT2, RandomState, bert_shape
from suite.selection import peer

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.cli.generate import run
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.convert import convert
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.native.write import write_lmcore
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from
from lmcore.families.bert.model import Bert
from lmcore.families.op_binding import OpBinding

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "capital", "of", "is"),
    *("paris", "france", ".", "a", "##s", "city", "in", "big"),
]
STATE = RandomState(bert_shape())  # with more rows than words
TEXTS = ("The capital of [MASK] is Paris.", "[MASK] is [MASK]", "a big city")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small WordPiece."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    settings = TokenizerSettings(
        "BertWordPieceLowerCase", vocab_file=str(path), add_special_tokens=False
    )
    return tokenizer_from(settings)


@pytest.fixture(scope="module")
def bert_run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """A run with a BERT of random weights."""
    directory = tmp_path_factory.mktemp("runs") / "bert"
    write_lmcore(STATE, directory, tokenizer)
    return str(directory)


def expected(text: str) -> list[torch.Tensor]:
    """Return the probabilities of the words for each mask, by the model without padding."""
    model = Bert(STATE.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).eval()
    model.load_state_dict({name: STATE.read(name) for name in STATE.parameters})
    pieces = text.lower().replace("[mask]", "[MASK]").replace(".", " .").split()
    ids = [WORDS.index(one) for one in ("[CLS]", *pieces, "[SEP]")]
    masks = [at for at, one in enumerate(ids) if one == WORDS.index("[MASK]")]
    with torch.no_grad():
        logits = model.masked_logits(model.hidden(torch.tensor([ids])), torch.tensor([masks]))
    return list(logits[0, :, : len(WORDS)].softmax(-1))


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the standard output of the command."""
    assert run([*argv, "--fill-mask", "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_one_mask(bert_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Five tokens by default, the most probable first, with the model's probabilities."""
    out = printed(capsys, "--load", bert_run, "--prompt", TEXTS[0])
    first, *lines = out.splitlines()
    assert first == TEXTS[0]
    best = expected(TEXTS[0])[0].topk(5)
    found = [line.split() for line in lines]
    assert [token for _, token in found] == [WORDS[one] for one in best.indices]
    assert [share for share, _ in found] == [f"{value:.2%}" for value in best.values]


def test_several_texts_and_masks(
    bert_run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of standard input are computed together, padded, with the same result as alone."""
    lines = "\n\n".join(TEXTS[:2]) + "\n"
    monkeypatch.setattr(sys, "stdin", Mock(buffer=io.BytesIO(lines.encode())))
    out = printed(capsys, "--load", bert_run, "--prompt", "-", "--json", "--top-k", "3")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["text"] for one in found] == list(TEXTS[:2])
    for one in found:
        wanted = expected(one["text"])
        assert len(one["masks"]) == len(wanted) == one["text"].count("[MASK]")
        for candidates, probabilities in zip(one["masks"], wanted, strict=True):
            best = probabilities.topk(3)
            assert [each["id"] for each in candidates] == best.indices.tolist()
            assert [each["token"] for each in candidates] == [WORDS[at] for at in best.indices]
            shares = torch.tensor([each["probability"] for each in candidates])
            torch.testing.assert_close(shares, best.values)


def test_masks_are_numbered(bert_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of the vocabulary that are no words are no candidates, however many are asked for."""
    out = printed(capsys, "--load", bert_run, "--prompt", TEXTS[1], "--top-k", "100")
    assert out.splitlines()[1] == "mask 1"
    assert out.splitlines()[2 + len(WORDS)] == "mask 2"
    assert len(out.splitlines()) == 3 + 2 * len(WORDS)


@pytest.mark.parametrize(
    "prompt,reason",
    [
        (TEXTS[2], "the text has no `[MASK]`"),
        ("[MASK] " * 20, "a text has 22 tokens, and the model 12 positions"),
        ("", "`--fill-mask` needs a text"),
    ],
)
def test_texts_that_are_refused(bert_run: str, prompt: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(["--load", bert_run, "--fill-mask", "--prompt", prompt, "--device", "cpu"])
    assert caught.value.what == reason
    assert caught.value.hint


@pytest.mark.parametrize(
    "flags",
    [["--greedy"], ["--tokens", "3"], ["--chat"], ["--quantization", "int8"], ["--logprobs", "1"]],
    ids=lambda flags: flags[0],
)
def test_options_without_a_meaning(bert_run: str, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="fill-mask"):
        run(["--load", bert_run, "--fill-mask", "--prompt", TEXTS[0], *flags])


def test_one_process_only(bert_run: str) -> None:
    with pytest.raises(ConfigError, match="runs in one process"):
        run(["--load", bert_run, "--fill-mask", "--tensor-model-parallel-size", "2"])


def test_other_models_are_refused(
    tmp_path: Path, bert_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPT fills no masks, and a BERT generates no text: each error has the command that works."""
    write_lmcore(RandomState(GPT2), tmp_path / "gpt", ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"GPT model .* fills no masks") as caught:
        run(["--load", str(tmp_path / "gpt"), "--fill-mask", "--prompt", TEXTS[0]])
    assert caught.value.hint == (
        f"continue a text: `lmcore generate --load {tmp_path / 'gpt'} --prompt "
        "'The capital of France is'`"
    )
    with pytest.raises(CheckpointError, match="cannot generate text") as caught:
        run(["--load", bert_run, "--prompt", TEXTS[0]])
    assert caught.value.why == "it predicts the tokens in the place of masks"
    command = str(caught.value.hint).removeprefix("fill masks: `lmcore generate ").rstrip("`")
    run(shlex.split(command))
    assert "%  [" in capsys.readouterr().out


def test_models_with_a_head_for_a_task(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """They fill no masks; converted to a run, they are not compared."""
    shape = replace(STATE.shape, task="classification", num_labels=3)
    write_lmcore(RandomState(shape), tmp_path / "run", tokenizer)
    with pytest.raises(CheckpointError, match="fills no masks") as caught:
        run(["--load", str(tmp_path / "run"), "--fill-mask", "--prompt", TEXTS[0]])
    assert caught.value.why == "its head is for the task `classification`"
    assert "load the model from before its fine-tuning" in str(caught.value.hint)
    with pytest.raises(CheckpointError, match="cannot generate text") as other:
        run(["--load", str(tmp_path / "run"), "--prompt", TEXTS[0]])
    assert (other.value.why, other.value.hint) == (caught.value.why, caught.value.hint)
    done = convert(tmp_path / "run", tmp_path / "again", "lmcore")
    assert done.agreement is None
    assert "BERT for classification" in str(done.not_compared)
    with pytest.raises(CheckpointError, match="computes the same as this model"):
        convert(tmp_path / "run", tmp_path / "other", "huggingface")


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_the_tokens_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tokens and probabilities as transformers, for a Hugging Face directory."""
    transformers: Any = peer("transformers")
    STATE.vocab_size = len(WORDS)
    write_huggingface(STATE, tmp_path, tokenizer)
    argv = ("--load", str(tmp_path), "--prompt", TEXTS[0], "--json")
    [found] = json.loads(printed(capsys, *argv))["masks"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    ids = theirs(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, ids["input_ids"][0].tolist().index(theirs.mask_token_id)]
    best = logits.softmax(-1).topk(5)
    assert [one["id"] for one in found] == best.indices.tolist()
    shares = torch.tensor([one["probability"] for one in found])
    torch.testing.assert_close(shares, best.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "text, words",
    [
        ("no mask", r"the text has no `\[MASK\]`"),
        ("[MASK] " + "a " * 99, "a text has 102 tokens, and the model"),
    ],
)
def test_texts_are_checked_before_weights_are_read(
    bert_run: str, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    """A text without a mask, or a too long one, costs no loading of a large model."""
    monkeypatch.setattr("lmcore.generation.fill_mask.allocate", Mock(side_effect=AssertionError))
    with pytest.raises(ConfigError, match=words):
        run(["--load", bert_run, "--fill-mask", "--device", "cpu", "--prompt", text])
