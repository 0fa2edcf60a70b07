"""Chat templates and end tokens that are kept with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from lmcore.base.errors import DataError
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from lmcore.data.tokenizer.pretrained.chat_files import chat_templates, end_tokens
from lmcore.data.tokenizer.saved import load_tokenizer, save_tokenizer

Make = Callable[..., Tokenizer]


@pytest.fixture
def make(make_pretrained: Callable[..., str], bert_pipeline: Callable[[], tokenizers.Tokenizer]):
    """Return what makes a tokenizer from a template in its configuration and further files."""

    def _make(template: object = None, **files: object) -> Tokenizer:
        path = make_pretrained(bert_pipeline(), {"eos_token": "[SEP]", "chat_template": template})
        for name, content in files.items():
            file = Path(path, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        return build_tokenizer("HFTokenizer", tokenizer_name_or_path=path)

    return _make


def test_templates(make: Make) -> None:
    """Templates are read from the configuration, or from separate files."""
    assert chat_templates(make()) == {}
    assert chat_templates(make("a")) == {"default": "a"}
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    assert chat_templates(make(named)) == {"default": "a", "rag": "b"}
    assert chat_templates(make(named, **{"chat_template.jinja": "c"})) == {"default": "c"}
    more = make("a", **{"additional_chat_templates/tool_use.jinja": "d"})
    assert chat_templates(more) == {"default": "c", "tool_use": "d"}
    assert chat_templates(ByteTokenizer()) == {}


@pytest.mark.parametrize("template", [1, [1], [{"name": "a"}], {"a": "b"}])
def test_wrong_template(template: object, make: Make) -> None:
    """A configuration without a valid template trains, and is an error where one is needed."""
    with pytest.raises(DataError, match="`chat_template` is no template"):
        chat_templates(make(template))


def test_end_tokens(make: Make) -> None:
    """A text ends at the tokenizer's end of a document, or at an end token for generation."""
    assert end_tokens(make()) == {3}
    for value, expected in ((4, {3, 4}), ([2, 4], {2, 3, 4}), (None, {3})):
        made = make(**{"generation_config.json": {"eos_token_id": value, "top_p": 0.5}})
        assert end_tokens(made) == expected
    for wrong in (True, [1, "2"], -1, 10_000, {}):
        made = make(**{"generation_config.json": {"eos_token_id": wrong}})
        with pytest.raises(DataError, match="`eos_token_id` is"):
            end_tokens(made)
    assert end_tokens(ByteTokenizer()) == {256}


def test_end_tokens_of_the_model(make: Make, tmp_path: Path) -> None:
    """`config.json` names end tokens where `generation_config.json` is missing, a default aside."""
    for value, expected in ((4, {3, 4}), ([2, 4], {2, 3, 4}), (None, {3}), ([6, 10_000], {3})):
        assert end_tokens(make(**{"config.json": {"eos_token_id": value}})) == expected
    tokenizer = make(**{"config.json": {"eos_token_id": [3, 4]}})
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    for path in tokenizer.files():
        Path(path).unlink()
    assert end_tokens(load_tokenizer(tmp_path / "tokenizer")) == {3, 4}
    both = {"config.json": {"eos_token_id": 4}, "generation_config.json": {"eos_token_id": 2}}
    assert end_tokens(make(**both)) == {2, 3}


def test_a_run_keeps_them(make: Make, tmp_path: Path) -> None:
    """The copy in a run directory has all of them, with the same fingerprint."""
    plain = make().fingerprint()
    tokenizer = make(
        None,
        **{
            "generation_config.json": {"eos_token_id": [3, 4]},
            "chat_template.jinja": "a",
            "additional_chat_templates/rag.jinja": "b",
        },
    )
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    for path in tokenizer.files():
        Path(path).unlink()
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.fingerprint() == plain
    assert chat_templates(loaded) == {"default": "a", "rag": "b"}
    assert end_tokens(loaded) == {3, 4}


def test_too_many_templates(make: Make) -> None:
    """A directory of many templates is refused."""
    with pytest.raises(DataError, match="has 65 files"):
        make(**{f"additional_chat_templates/{i}.jinja": "" for i in range(65)})
