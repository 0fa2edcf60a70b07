"""Answers to each request of lm-eval-harness, against its own Hugging Face backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from suite.selection import peer

pytestmark = [pytest.mark.full, pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

_POSITIONS = 64
_WORDS = ["Hello world", "the best of times", "it was the worst of times", "Is it a dog? It is!"]
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|> {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


def write_tokenizer(folder: Path, *, begins: bool) -> int:
    """Write a byte-level BPE tokenizer for Hugging Face; return the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([_TEXT, *_WORDS], trainer)
    made.add_special_tokens([AddedToken(one, special=True) for one in ("<s>", "</s>")])
    if begins:
        made.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": _TEMPLATE,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return int(made.get_vocab_size())


def write_gpt2(folder: Path) -> None:
    import transformers

    size = write_tokenizer(folder, begins=False)
    config = transformers.GPT2Config(
        vocab_size=size,
        n_positions=_POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.4,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def write_llama(folder: Path) -> None:
    import transformers

    size = write_tokenizer(folder, begins=True)
    config = transformers.LlamaConfig(
        vocab_size=size,
        max_position_embeddings=_POSITIONS,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module", params=[write_gpt2, write_llama], ids=["gpt2", "llama"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """One checkpoint as a model of lmcore, and of the Hugging Face backend."""
    peer("lm_eval")
    peer("transformers")
    from lm_eval.models.huggingface import HFLM

    from lmcore.evaluation.harness.model import HarnessModel

    torch.manual_seed(5)
    folder: Path = tmp_path_factory.mktemp("model")
    request.param(folder)
    # Its cache takes the wrong place where two requests differ in the last token alone, and their
    # answers have different lengths.
    options = {"dtype": "float32", "batch_size": 3, "logits_cache": False}
    theirs = HFLM(pretrained=str(folder), device="cpu", **options)
    ours = HarnessModel.create_from_arg_string(f"path={folder},precision=fp32,device=cpu")
    return ours, theirs


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Make requests as a task of the harness does."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, at) for at, one in enumerate(arguments)]


def test_loglikelihood(models: tuple[Any, Any]) -> None:
    """Several answers to one context, spaces at its end, none, one too long, special tokens."""
    pairs = [
        ("It was the", " best"),
        ("It was the", " worst of times"),
        ("It was the ", "age of wisdom"),
        ("", "Hello world"),
        ("", "<s>Hello world"),
        ("<s>It was", " the best"),
        ("Hello</s>", "It"),
        (_TEXT, " Is it?"),
        ("Hé", "lló wörld\n"),
    ]
    asked = instances("loglikelihood", pairs)
    ours, theirs = (one.loglikelihood(asked) for one in models)
    assert [one[0] for one in ours] == pytest.approx([one[0] for one in theirs], abs=1e-4)
    assert [one[1] for one in ours] == [one[1] for one in theirs]


def test_a_greedy_continuation_is_greedy(models: tuple[Any, Any]) -> None:
    ours, theirs = models
    wanted = {"until": [], "max_gen_toks": 3}
    (text,) = theirs.generate_until(instances("generate_until", [("It was", wanted)]))
    asked = instances("loglikelihood", [("It was", text)])
    assert ours.loglikelihood(asked)[0][1] == theirs.loglikelihood(asked)[0][1]


def test_loglikelihood_rolling(models: tuple[Any, Any]) -> None:
    """Texts of one window and of several."""
    asked = instances("loglikelihood_rolling", [(_TEXT,), ("Hello world",), (_TEXT[:80],)])
    ours, theirs = (one.loglikelihood_rolling(asked) for one in models)
    assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-6)


def test_generate_until(models: tuple[Any, Any]) -> None:
    """Texts that end at their length, at stop texts, and after contexts that are too long."""
    whole = {"until": [], "max_gen_toks": 20, "do_sample": False}
    first = instances("generate_until", [(one, dict(whole)) for one in (*_WORDS, _TEXT)])
    ours, theirs = (one.generate_until(first) for one in models)
    assert ours == theirs
    stops = [text[3:5] for text in theirs]
    asked = instances(
        "generate_until",
        [
            (context, {"until": [stop, "</s>"], "max_gen_toks": 20, "temperature": 0.0})
            for context, stop in zip((*_WORDS, _TEXT), stops, strict=True)
        ],
    )
    ours, theirs = (one.generate_until(asked) for one in models)
    assert ours == theirs


def test_texts_of_a_stopped_evaluation(models: tuple[Any, Any], tmp_path: Path) -> None:
    """Texts that the file has are not generated again; the others are."""
    from lmcore.evaluation.journal import Journal

    ours, path = models[0], tmp_path / "a.part"
    options = {"until": ["\n"], "max_gen_toks": 9}
    asked = instances("generate_until", [(one, dict(options)) for one in _WORDS])
    made: list[int] = []
    progress, ours.progress = ours.progress, lambda _kind, done, _total: made.append(done)
    try:
        ours.journal = Journal(path)
        whole = ours.generate_until(asked)
        ours.journal.close()
        # A text that no model makes shows that it comes from the file.
        path.write_text(path.read_text().replace(json.dumps(whole[0]), '"kept"'))
        ours.journal, made[:] = Journal(path), []
        assert ours.generate_until(asked) == ["kept", *whole[1:]]
        assert made == []
        others = instances("generate_until", [(one, {**options, "until": []}) for one in _WORDS])
        ours.generate_until(others)
        assert made[-1] == len(others)
        ours.journal.close()
    finally:
        ours.journal, ours.progress = None, progress


def test_chat_template(models: tuple[Any, Any]) -> None:
    chat = [{"role": "user", "content": "Hello "}, {"role": "assistant", "content": "It was "}]
    ours, theirs = models
    for messages, begins in ((chat[:1], True), (chat, False)):
        texts = [one.apply_chat_template(messages, add_generation_prompt=begins) for one in models]
        assert texts[0] == texts[1]
        asked = instances("loglikelihood", [(texts[0], " world")])
        pair = [one.loglikelihood(asked)[0][0] for one in models]
        assert pair[0] == pytest.approx(pair[1], abs=1e-4)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name


def test_scores_of_tasks_in_files(models: tuple[Any, Any], tmp_path: Path) -> None:
    """The whole of lm-eval-harness on a task with solved examples, by the name of the model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [{"q": one, "a": ["yes", "no"], "gold": at % 2} for at, one in enumerate(_WORDS * 2)]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(one) for one in rows))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{q}} A:",
        "doc_to_choice": "{{a}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    found = [
        simple_evaluate(model=one, tasks=[dict(task)], num_fewshot=1, task_manager=TaskManager())
        for one in models
    ]
    ours, theirs = (one["results"]["mine"] for one in found)
    assert ours == theirs
