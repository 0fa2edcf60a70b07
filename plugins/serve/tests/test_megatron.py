"""`PUT /api`: Megatron-LM's fields, limits and replies, with honest statuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmcore.generation.beam import beam_search
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel
from lmcore_serve.api.megatron import _NoNewlineAfterColon
from lmcore_serve.command.serve import ServeSection

from .conftest import Server, running_server


def ids(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(text.encode())


def test_the_published_request(server: Server) -> None:
    """The reply has the whole text, the text of each token, and no log-probabilities."""
    body = b'{"prompts":["Hello world"], "tokens_to_generate":1}'
    header = {"Content-Type": "application/json; charset=UTF-8"}
    for _ in range(5):  # without a seed: one token in 257 ends the text
        reply = server.ask("/api", body, headers=header)
        assert reply.status == 200
        assert set(reply.json) == {"text", "segments", "logprobs"}
        assert reply.json["logprobs"] is None
        (text,), (segments,) = reply.json["text"], reply.json["segments"]
        assert text.startswith("Hello world")
        if text != "Hello world":
            break
    assert len(text) == len("Hello world") + 1
    assert segments == list(text)


def test_tokens_and_logprobs(server: Server, loaded: LoadedModel) -> None:
    """Seeded tokens equal the engine's; log-probabilities cover the prompts, too."""
    options = {"top_k": 5, "temperature": 0.7, "random_seed": 3}
    prompts = ["One", "Two and"]
    reply = server.ask(
        "/api", {"prompts": prompts, "tokens_to_generate": 8, "logprobs": True, **options}
    )
    requests = [
        Request(ids(prompt), 8, SamplingOptions(0.7, 5), 3 + number, frozenset({256}), None, 0)
        for number, prompt in enumerate(prompts)
    ]
    for number, found in enumerate(recompute(loaded.model, requests, 257)):
        prompt = prompts[number]
        assert reply.json["text"][number] == prompt + loaded.tokenizer.decode(found.tokens)
        logprobs = reply.json["logprobs"][number]
        assert len(logprobs) == len(prompt) - 1 + len(found.tokens)
        assert logprobs[len(prompt) - 1 :] == pytest.approx(
            [one.logprob for one in found.logprobs], abs=1e-4
        )


def test_the_end_token_is_replied(server: Server, loaded: LoadedModel) -> None:
    """A text that the model ended has the end token, with its segment and log-probability."""
    prompts = [f"prompt {number}" for number in range(8)]
    options = {"temperature": 100.0, "random_seed": 1}
    reply = server.ask(
        "/api", {"prompts": prompts, "tokens_to_generate": 80, "logprobs": True, **options}
    )
    requests = [
        Request(ids(prompt), 80, SamplingOptions(100.0), 1 + number, frozenset({256}))
        for number, prompt in enumerate(prompts)
    ]
    found = recompute(loaded.model, requests, 257)
    assert {one.stop_token for one in found} == {None, 256}
    for number, one in enumerate(found):
        tokens = [*ids(prompts[number]), *one.tokens, *[256] * (one.stop_token is not None)]
        assert len(reply.json["segments"][number]) == len(tokens)
        assert len(reply.json["logprobs"][number]) == len(tokens) - 1
        text = prompts[number] + loaded.tokenizer.decode(one.tokens)
        end = "" if one.stop_token is None else loaded.tokenizer.decode([256])
        assert reply.json["text"][number] == text + end


def test_scores_only(server: Server) -> None:
    """No tokens, with log-probabilities of the prompt."""
    reply = server.ask("/api", {"prompts": ["Hello"], "tokens_to_generate": 0, "logprobs": True})
    assert reply.json["text"] == ["Hello"]
    assert len(reply.json["logprobs"][0]) == 4


def test_beam_search(server: Server, loaded: LoadedModel) -> None:
    """All texts of the width, the best first, with their scores."""
    reply = server.ask(
        "/api",
        {"prompts": ["Ab"], "tokens_to_generate": 5, "beam_width": 3, "length_penalty": 0.5},
    )
    expected = beam_search(
        loaded.model,
        ids("Ab"),
        width=3,
        max_tokens=5,
        vocab_size=257,
        stop_tokens=frozenset({256}),
        length_penalty=0.5,
    )
    assert reply.json["scores"] == pytest.approx([one.score for one in expected], abs=1e-4)
    assert reply.json["text"] == ["Ab" + loaded.tokenizer.decode(one.tokens) for one in expected]
    assert [len(one) for one in reply.json["segments"]] == [2 + len(one.tokens) for one in expected]


@pytest.mark.parametrize(
    "body, problem",
    [
        ({}, "`prompts`: field required"),
        ([], "JSON object"),
        ("text", "JSON object"),
        ({"prompts": "Hello"}, "`prompts`: input should be a valid list"),
        ({"prompts": []}, "`prompts`"),
        ({"prompts": ["a"] * 129}, "at most 128"),
        ({"prompts": [1]}, "`prompts.0`"),
        ({"prompts": ["a"], "max_len": 5}, "use `tokens_to_generate`"),
        ({"sentences": ["a"], "prompts": ["a"]}, "use `prompts`"),
        ({"prompts": ["a"], "tokens": 5}, "`tokens` is not a field"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "greater than or equal to 0"),
        ({"prompts": ["a"], "tokens_to_generate": "5"}, "valid integer"),
        ({"prompts": ["a"], "tokens_to_generate": 1.5}, "valid integer"),
        ({"prompts": ["a"], "tokens_to_generate": True}, "valid integer"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "needs `logprobs`"),
        ({"prompts": ["a"], "logprobs": 1}, "valid boolean"),
        ({"prompts": ["a"], "temperature": 0}, "greater than 0"),
        ({"prompts": ["a"], "temperature": 101}, "less than or equal to 100"),
        ({"prompts": ["a"], "temperature": "hot"}, "valid number"),
        ({"prompts": ["a"], "top_k": 1001}, "less than or equal to 1000"),
        ({"prompts": ["a"], "top_p": 1.1}, "less than or equal to 1"),
        ({"prompts": ["a"], "top_p": 0.5, "top_k": 5}, "exclude each other"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "needs `top_p`"),
        ({"prompts": ["a"], "top_p_bound": 0.5}, "needs `top_p`"),
        ({"prompts": ["a"], "top_p": 0.4, "top_p_bound": 0.5}, "above `top_p`"),
        ({"prompts": [""]}, "needs `add_BOS`"),
        ({"prompts": ["a"], "random_seed": -2}, "greater than or equal to -1"),
        ({"prompts": ["a", "b"], "beam_width": 2}, "one prompt"),
        ({"prompts": ["a"], "beam_width": 0}, "greater than or equal to 1"),
        ({"prompts": ["a"], "beam_width": 2, "logprobs": True}, "cannot be used"),
        ({"prompts": ["a"], "beam_width": 2, "length_penalty": 10.5}, "less than or equal to 10"),
        ({"prompts": ["a"], "beam_width": 128, "tokens_to_generate": 95}, "128 beams of up to 96"),
        ({"prompts": ["a"], "beam_width": 2, "stop_token": 257}, "outside the vocabulary"),
        ({"prompts": ["a" * 97]}, "97 tokens; the model has 96 positions"),
        ({"prompts": ["a" * 90]}, "leave room for 7"),
        ({"prompts": ["a" * 90] * 128, "tokens_to_generate": 6}, "too many tokens"),
    ],
)
def test_wrong_requests(server: Server, body: Any, problem: str) -> None:
    """The status is 400, and the message, where Megatron's client reads it, says what is wrong."""
    reply = server.ask("/api", body)
    assert reply.status == 400
    assert reply.json.keys() == {"message"}
    assert problem in reply.json["message"]


def test_as_many_prompts_as_a_request_may_have(loaded: LoadedModel) -> None:
    """The queue of a server with default limits has room for them."""
    section = ServeSection()
    with running_server(
        loaded, max_running=section.max_requests, max_waiting=section.max_waiting
    ) as server:
        reply = server.ask("/api", {"prompts": ["a"] * 128, "tokens_to_generate": 1})
    assert reply.status == 200, reply.json
    assert len(reply.json["text"]) == 128


def test_add_bos(server: Server) -> None:
    """The token that begins a document comes first; an empty prompt is then valid."""
    reply = server.ask("/api", {"prompts": ["", "a"], "tokens_to_generate": 2, "add_BOS": True})
    assert reply.status == 200
    assert [len(one) for one in reply.json["segments"]] == [3, 4]


def test_rules_of_lines(server: Server) -> None:
    """A text ends with a line break if one is asked for; none follows a colon."""
    tight = {"prompts": ["ab:"], "tokens_to_generate": 60, "temperature": 3.0, "random_seed": 1}
    found = server.ask("/api", {**tight, "stop_on_eol": True}).json["text"][0]
    assert "\n" not in found[:-1]
    for seed in range(20):
        text = server.ask(
            "/api",
            {
                "prompts": ["ab:"],
                "tokens_to_generate": 1,
                "temperature": 100.0,
                "random_seed": seed,
                "prevent_newline_after_colon": True,
            },
        ).json["text"][0]
        assert "\n" not in text


def test_defaults_are_no_contradiction(server: Server) -> None:
    """A client may send each field with its default value."""
    body = {"prompts": ["a"], "tokens_to_generate": 1}
    beams = {"beam_width": 1, "temperature": 1.0, "top_k": 0, "top_p": 0.0, "random_seed": -1}
    assert server.ask("/api", {**body, **beams}).status == 200
    none = {"beam_width": None, "stop_token": None, "length_penalty": 1.0}
    assert server.ask("/api", {**body, **none}).status == 200


def test_the_access_log_counts_beams(loaded: LoadedModel) -> None:
    """The tokens of all texts of beam search count as generated."""
    with running_server(loaded) as server:
        server.ask("/api", {"prompts": ["Ab"], "tokens_to_generate": 5, "beam_width": 3})
    assert json.loads(server.log[0])["generated_tokens"] == 15


def test_a_small_head(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the model has no logits for are left out of a rule, and only these."""
    model = server.models["tiny"]
    monkeypatch.setitem(vars(model), "tokens_that_begin_a_line", [10, 30, 200])
    rule = _NoNewlineAfterColon(model, ids("a:"))
    assert (~rule.allowed(100)).nonzero().flatten().tolist() == [10, 30]
    assert (~rule.allowed(257)).nonzero().flatten().tolist() == [10, 30, 200]


def test_other_methods(server: Server) -> None:
    """Only PUT is there."""
    reply = server.ask("/api", method="GET")
    assert reply.status == 405
    assert reply.headers["allow"] == "PUT"
