"""Directories of transformers are read, and ours are loaded by it, with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import SHAPES, RandomState
from suite.selection import peer

from lmcore.accelerator import OP_SPECS, OpTable
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.huggingface.written_config import config_of, model_type_of
from lmcore.conversion.state import ModelState
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, Tokenizer
from lmcore.model.gpt import GPT
from lmcore.model.op_binding import OpBinding

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
