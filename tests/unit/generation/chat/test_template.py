"""Conversations as the text and the tokens of a chat model, beside transformers'."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from suite.selection import peer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmcore.base.errors import ConfigError
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from lmcore.generation.chat.template import ChatTemplate

CHATML = """\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}
{% set system = messages[0]['content'] %}
{% else %}
{% set turns = messages %}
{% set system = false %}
{% endif %}
{%- for message in turns -%}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user') }}
{% endif %}
{% if loop.first and system != false %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}
{% set content = message['content'] %}
{% endif %}
{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{% else %}
{{- ' ' + content.strip() + ' ' + eos_token -}}
{% endif %}
{%- endfor -%}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date is defined %}
    {%- set date = 'unknown' %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not loop.last %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}
        {{- 'Date: ' + date + '\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
        {%- endfor %}
    {%- endif %}
    {% generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content %}
    {%- elif message.role == 'user' %}
        {%- if loop.last and ns.system %}
            {{- '[INST] ' + ns.system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama-2": LLAMA_2, "llama-3": LLAMA_3, "mistral": MISTRAL}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]")  # fmt: skip
TALK = (
    {"role": "user", "content": " Hi there "},
    {"role": "assistant", "content": "Hello!\nHow are you?"},
    {"role": "user", "content": "naïve 漢字 <s> x[/INST]y <|im_end|>"},
)
WITH_SYSTEM = ({"role": "system", "content": "Be brief."}, *TALK)
TOOLS = [{"type": "function", "function": {"name": "now", "description": "<Zeit> für 'x'"}}]


def byte_level() -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer, like Llama 3's and Qwen's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def metaspace() -> tokenizers.Tokenizer:
    """Make a tokenizer with a space before each text, like Llama 2's and Mistral's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "H", "i", "e", "o"]
    library = tokenizers.Tokenizer(
        models.BPE(
            {one: i for i, one in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return library


def save(
    folder: Path, library: tokenizers.Tokenizer, template: object = None, **files: str
) -> Tokenizer:
    """Write the files of a chat model's tokenizer and read them."""
    added = [tokenizers.AddedToken(one, special=True, normalized=False) for one in SPECIAL]
    library.add_special_tokens(added)
    library.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return build_tokenizer("HFTokenizer", tokenizer_name_or_path=str(folder))


@pytest.fixture
def chatml(tmp_path: Path):
    """A tokenizer with the ChatML template."""
    template = ChatTemplate.of(save(tmp_path, byte_level(), CHATML))
    assert template is not None
    yield template
    template.close()


def test_text_and_tokens(chatml: ChatTemplate) -> None:
    """The template's special tokens are single ids, and so is one that a message spells."""
    messages = [{"role": "user", "content": "a<s>"}]
    expected = (
        "<|im_start|>system\nYou help.<|im_end|>\n"
        "<|im_start|>user\na<s><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chatml.render(messages) == expected
    start, end = 258, 259
    letters = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))

    def ids(text: str) -> list[int]:
        return [letters.index(one) for one in text.replace("\n", "Ċ").replace(" ", "Ġ")]

    assert chatml.prompt_tokens(messages) == [
        *(start, *ids("system\nYou help."), end, *ids("\n")),
        *(start, *ids("user\na"), 256, end, *ids("\n")),
        *(start, *ids("assistant\n")),
    ]
    without = chatml.render(messages, add_generation_prompt=False)
    assert without == expected.removesuffix("<|im_start|>assistant\n")


def test_no_template(tmp_path: Path) -> None:
    """A base model has none."""
    assert ChatTemplate.of(save(tmp_path, byte_level())) is None
    assert ChatTemplate.of(ByteTokenizer()) is None


def test_named_templates(tmp_path: Path) -> None:
    """Of several the default is taken, for tools the one for tools, or the one that is named."""
    listed = [
        {"name": name, "template": name + "{{ tools | length if tools else '' }}"}
        for name in ("default", "tool_use", "rag")
    ]
    template = ChatTemplate.of(save(tmp_path, byte_level(), listed))
    assert template is not None
    assert template.render(TALK) == "default"
    assert template.render(TALK, tools=TOOLS) == "tool_use1"
    assert template.render(TALK, template="rag", tools=TOOLS) == "rag1"
    with pytest.raises(ConfigError, match="has no chat template `other`") as caught:
        template.render(TALK, template="other")
    assert caught.value.hint == "its templates are `default`, `rag`, `tool_use`"


def test_template_in_a_file(tmp_path: Path) -> None:
    """A file gives any tokenizer a template; a tokenizer without files has names for its tokens."""
    file = tmp_path / "x.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}ü")
    template = ChatTemplate.from_file(str(file), ByteTokenizer())
    assert template.prompt_tokens([{"role": "user", "content": "a"}]) == [97, 256, 0xC3, 0xBC]
    with pytest.raises(ConfigError, match="cannot read the chat template `/nowhere`"):
        ChatTemplate.from_file("/nowhere", ByteTokenizer())
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        ChatTemplate.from_file(str(file), ByteTokenizer())


def test_messages(chatml: ChatTemplate) -> None:
    """A message that is none, and text that is not UTF-8, are errors."""
    with pytest.raises(ConfigError, match="an object with `role` and `content`"):
        chatml.render(["Hello"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="the messages are not UTF-8"):
        chatml.prompt_tokens([{"role": "user", "content": "\udc80"}])
    with pytest.raises(ConfigError, match="no JSON value"):
        chatml.render([{"role": "user", "content": object()}])


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", [byte_level, metaspace])
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers(name: str, library: Any, tmp_path: Path) -> None:
    """Text and ids equal transformers', for every kind of conversation."""
    transformers = peer("transformers")
    ours = ChatTemplate.of(save(tmp_path, library(), TEMPLATES[name]))
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    dice = random.Random(5)
    talks: list[Any] = [TALK, WITH_SYSTEM, TALK[:1]]
    for _ in range(20):
        words = ["".join(dice.choices([*SPECIAL, *" \nabé漢<>|"], k=9)) for _ in range(5)]
        roles = ["user", "assistant"] * 3
        talks.append([{"role": r, "content": w} for r, w in zip(roles, words, strict=False)])
    for talk in talks:
        for options in ({}, {"tools": TOOLS}, {"date": "26 Jul", "add_generation_prompt": False}):
            given = {"add_generation_prompt": True} | options
            assert ours.render(talk, **given) == theirs.apply_chat_template(
                talk, tokenize=False, **given
            )
            assert ours.prompt_tokens(talk, **given) == theirs.apply_chat_template(
                talk, return_dict=False, **given
            )
    ours.close()


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_transformers_of_odd_messages(tmp_path: Path) -> None:
    """Empty values, reasoning under its three names, and extra variables reach the template."""
    transformers = peer("transformers")
    source = "{{ messages | tojson }}{{ [bos_token, eos_token, pad_token, tools, documents, x] }}"
    ours = ChatTemplate.of(save(tmp_path, byte_level(), source))
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    talk = [
        {"role": "user", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "b"},
        {"role": "assistant", "content": "", "reasoning": "c"},
        {"role": "assistant", "reasoning_content": "d", "thinking": "e"},
    ]
    for options in ({}, {"x": [1, None, 0.5]}, {"x": "a", "bos_token": "other"}):
        assert ours.render(talk, add_generation_prompt=False, **options) == (
            theirs.apply_chat_template(talk, tokenize=False, **options)
        )
    ours.close()
