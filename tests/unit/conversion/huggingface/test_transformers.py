"""Directories of transformers are read, and ours are loaded by it, with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import BERT, SHAPES, RandomState, bert_shape
from suite.selection import peer

from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings, write_tokenizer
from lmcore.conversion.huggingface.write import config_of, model_type_of, write_huggingface
from lmcore.conversion.state import ModelState
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, Tokenizer, tokenizer_from
from lmcore.families.bert.model import Bert
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.randint(0, 257, (2, 31), generator=torch.Generator().manual_seed(3))


def logits_of(state: ModelState) -> torch.Tensor:
    """Return the logits of our model with the weights of a state."""
    model = GPT(state.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.read(name))
        return model.logits(model(TOKENS))


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_what_we_had(tmp_path: Path, name: str) -> None:
    transformers = peer("transformers")
    state = RandomState(SHAPES[name])
    write_huggingface(state, tmp_path, ByteTokenizer(), largest_file=20_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = model(TOKENS).logits
    torch.testing.assert_close(found, logits_of(state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_load_what_transformers_had(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    transformers = peer("transformers")
    shape = SHAPES[name]
    values = config_of(shape, dtype="float32", eos=None, bos=None)
    kind = values.pop("model_type")
    assert kind == model_type_of(shape)
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    state = HuggingFaceState(tmp_path)
    assert state.shape == shape
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = again.eval()(TOKENS).logits
    torch.testing.assert_close(logits_of(state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "gpt2"])
def test_generation_is_the_same(tmp_path: Path, name: str) -> None:
    """Both programs continue a prompt with the same tokens, each over its cache."""
    transformers = peer("transformers")
    state = RandomState(SHAPES[name])
    write_huggingface(state, tmp_path, ByteTokenizer())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = TOKENS[:1, :7]
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": -1, "pad_token_id": 0}
    expected = theirs.generate(prompt, **options)[0, 7:].tolist()
    model = GPT(state.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).eval()
    cache, found = model.new_cache(torch.float32), list[int]()
    cache.reserve(1, 32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(state.read(parameter_name))
        hidden = model(prompt, cache.first_tokens([0], 7))
        for length in range(7, 27):
            found.append(int(model.logits(hidden[:, -1:]).argmax()))
            hidden = model(torch.tensor([found[-1:]]), cache.next_tokens([length]))
    assert found == expected
    assert len(set(found)) > 1


def texts() -> list[str]:
    return ["Hello world's  end\n\t", "naïve café, 価格 5 €", " <|endoftext|> ", ""]


def same_ids(tokenizer: Tokenizer, theirs: Any) -> None:
    for text in texts():
        plain = text.replace("<|endoftext|>", "")
        ids = theirs(plain, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(plain), plain
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == plain
    assert theirs.eos_token_id == tokenizer.eod


def test_tokenizers_give_the_same_ids(tmp_path: Path) -> None:
    transformers = peer("transformers")
    data = Path(__file__).parents[5] / "shared/data/tokenizers/gpt2-tiny"
    state = RandomState(SHAPES["gpt2"])
    tokenizers: dict[str, Tokenizer] = {"byte": ByteTokenizer()}
    if data.is_dir():
        files = [str(data / f"gpt2-tiny-{name}") for name in ("vocab.json", "merges.txt")]
        tokenizers["bpe"] = GPT2BPETokenizer(*files)
    for name, tokenizer in tokenizers.items():
        directory = tmp_path / name
        directory.mkdir()
        write_huggingface(state, directory, tokenizer)
        same_ids(tokenizer, transformers.AutoTokenizer.from_pretrained(directory))


def our_bert(state: ModelState, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of both heads of our BERT, at every token."""
    model = Bert(state.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state.read(name))
        hidden = model.hidden(*batch.values())
        every = torch.arange(hidden.shape[1]).expand(len(hidden), -1)
        found = [model.masked_logits(hidden, every)]
        return [*found, model.order_logits(hidden)] if hasattr(model, "order_head") else found


def their_bert(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of both heads of a BERT of transformers."""
    names = ("input_ids", "token_type_ids")
    with torch.no_grad():
        found = model.eval()(
            **dict(zip(names, batch.values(), strict=False)),
            attention_mask=(~batch["padding"]).long(),
        )
    if hasattr(found, "seq_relationship_logits"):
        return [found.prediction_logits, found.seq_relationship_logits]
    return [found.logits]


@pytest.fixture
def bert_batch() -> dict[str, torch.Tensor]:
    """Two samples of two segments, the second with padding."""
    generator = torch.Generator().manual_seed(4)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True
    return {
        "tokens": torch.randint(0, 32, (2, 11), generator=generator),
        "types": (torch.arange(11) > 4).long().expand(2, -1),
        "padding": padding,
    }


@pytest.mark.parametrize("gelu", ["erf", "tanh-all"])
@pytest.mark.parametrize("head", [True, False], ids=["both heads", "masked head"])
def test_bert_both_ways(
    tmp_path: Path, bert_batch: dict[str, torch.Tensor], gelu: str, head: bool
) -> None:
    """Transformers computes what we write, and we compute what it writes, tensors unchanged."""
    transformers = peer("transformers")
    state = RandomState(bert_shape(bert_gelu=gelu, bert_binary_head=head))
    (tmp_path / "ours").mkdir()
    write_huggingface(state, tmp_path / "ours", None)
    kind = transformers.BertForPreTraining if head else transformers.BertForMaskedLM
    theirs, info = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    expected = our_bert(state, bert_batch)
    assert len(expected) == 1 + head
    for found, one in zip(their_bert(theirs, bert_batch), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs")
    again = HuggingFaceState(tmp_path / "theirs")
    assert (again.shape, list(again.notes)) == (state.shape, [])
    for name in state.parameters:
        assert torch.equal(again.read(name), state.read(name)), name
    for found, one in zip(our_bert(again, bert_batch), their_bert(theirs, bert_batch), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


def test_bert_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    """By `vocab.txt` of theirs, and by the files that we write."""
    transformers = peer("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] + ["paris", ".", ","]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs/vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = tokenizer_settings(tmp_path / "theirs")
    assert settings is not None
    ours = tokenizer_from(settings)
    write_tokenizer(ours, tmp_path / "ours", BERT)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert len(theirs) == ours.vocab_size
    for text in ("Paris, café in Nîmes.", "PARIS  is\tbig", ""):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
