"""Models of EleutherAI's evaluation harness that ask a server, against the model's own scores."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from suite.selection import peer

from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel

from .conftest import Server, running_server

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
END = "<|endoftext|>"
LENGTH = 40


@pytest.fixture(scope="module")
def harness() -> Any:
    """The module with the models of the harness."""
    peer("lm_eval")
    peer("transformers")
    from lm_eval.models import openai_completions

    return openai_completions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of Hugging Face that gives the ids of `ByteTokenizer`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's characters for bytes: its own if it is printable, otherwise the next from U+0100.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    vocab = {chr(byte): byte for byte in shown}
    vocab |= {chr(256 + at): byte for at, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def chat(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model that chats."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")
    with running_server(
        loaded, change=lambda model: dataclasses.replace(model, template=template)
    ) as made:
        yield made
    template.close()


def model_of(harness: Any, server: Server, tokenizer: Path, **options: Any) -> Any:
    """Make a model of the harness that sends token ids to a server."""
    return harness.LocalCompletionsAPI(
        model="tiny",
        base_url=f"http://127.0.0.1:{server.port}/v1/completions",
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        max_length=LENGTH,
        max_retries=1,
        **options,
    )


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Make requests as a task of the harness does."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, at) for at, one in enumerate(arguments)]


def scored(loaded: LoadedModel, ids: Sequence[int], start: int) -> tuple[float, bool]:
    """Sum of the log-probabilities of the tokens from *start*, and whether all are the highest."""
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model(torch.tensor([ids])))[0, :, :257]
    rows = range(start - 1, len(ids) - 1)
    wanted = list(ids[start:])
    values = logits.log_softmax(-1)[rows, wanted]
    return values.sum().item(), logits[rows].argmax(-1).tolist() == wanted


def greedy(loaded: LoadedModel, prompt: str, length: int) -> list[int]:
    """Return the tokens that recomputation gives."""
    sampling = SamplingOptions(greedy=True)
    request = Request(list(prompt.encode()), length, sampling, 0, frozenset({256}))
    (found,) = recompute(loaded.model, [request], 257)
    return list(found.tokens)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"num_concurrent": 3}])
def test_loglikelihood(
    harness: Any, server: Server, loaded: LoadedModel, tokenizer: Path, options: dict[str, Any]
) -> None:
    """Scores of continuations, the likeliest one, one of a document's start and a long one."""
    best = loaded.tokenizer.decode(greedy(loaded, "Hello", 3))
    pairs = [("Hello", " you"), ("Hello", best), ("", "start"), ("a" * 50, "bcd")]
    model = model_of(harness, server, tokenizer, **options)
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        before = list(context.encode()) or [256]
        ids = [*before, *continuation.encode()][-(LENGTH - 1) :]
        expected = scored(loaded, ids, len(ids) - len(continuation))
        assert value == pytest.approx(expected[0], abs=1e-3)
        assert is_greedy == expected[1]
    assert [one[1] for one in found[:2]] == [False, True]


def test_a_text_that_the_model_would_end(
    harness: Any, loaded: LoadedModel, tokenizer: Path
) -> None:
    """The harness drops the last token, which it takes for a generated one: there is one."""
    (end,) = greedy(loaded, "Hello you", 1)

    def ended(model: Any) -> Any:
        model.__dict__["stop_tokens"] = frozenset({end})
        return model

    with running_server(loaded, change=ended) as server:
        model = model_of(harness, server, tokenizer)
        ((value, _),) = model.loglikelihood(
            instances("loglikelihood", [("Hello", " you")]), disable_tqdm=True
        )
    assert value == pytest.approx(scored(loaded, list(b"Hello you"), 5)[0], abs=1e-3)


def test_loglikelihood_rolling(
    harness: Any, server: Server, loaded: LoadedModel, tokenizer: Path
) -> None:
    """A text longer than the model is scored in windows, each token once."""
    from lm_eval import utils

    text = "It was the best of times, it was the worst of times, it was the age of wisdom."
    model = model_of(harness, server, tokenizer)
    (found,) = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    windows = [
        utils.make_disjoint_window(one)
        for one in utils.get_rolling_token_windows(list(text.encode()), 256, LENGTH - 2, 1)
    ]
    assert sum(len(rest) for _, rest in windows) == len(text)
    expected = sum(scored(loaded, [*start, *rest], len(start))[0] for start, rest in windows)
    assert found == pytest.approx(expected, abs=1e-3)


def test_generate_until(harness: Any, server: Server, loaded: LoadedModel, tokenizer: Path) -> None:
    """Texts end at their length, or before a stop text."""
    whole = loaded.tokenizer.decode(greedy(loaded, "Hello", 12))
    stop = whole[5:7]
    wanted = [
        ("Hello", {"until": [], "max_gen_toks": 12, "do_sample": False}),
        ("Hello", {"until": [stop], "max_gen_toks": 12, "temperature": 0.0}),
    ]
    model = model_of(harness, server, tokenizer)
    found = model.generate_until(instances("generate_until", wanted), disable_tqdm=True)
    assert found == [whole, whole[: whole.index(stop)]]


def test_chat(harness: Any, chat: Server, loaded: LoadedModel) -> None:
    """The harness sends messages, and gets the answer that the template's prompt gives."""
    model = harness.LocalChatCompletion(
        model="tiny",
        base_url=f"http://127.0.0.1:{chat.port}/v1/chat/completions",
        max_retries=1,
        eos_string=END,
    )
    prompt = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    wanted = [(prompt, {"until": ["\n\n"], "max_gen_toks": 9, "temperature": 0})]
    found = model.generate_until(instances("generate_until", wanted), disable_tqdm=True)
    assert found == [loaded.tokenizer.decode(greedy(loaded, "u:Hi;a:", 9))]
