"""A model with an encoder: prompts are answered, texts and streams; what continues is refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import save_checkpoint
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.op_binding import OpBinding
from lmcore.families.t5.model import T5Model
from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape
from lmcore_serve.command.ask import run as ask
from lmcore_serve.command.serve import run as serve

from .conftest import Server, running_server, served

PATH = "/v1/completions"
SHAPE = ModelShape(
    *(2, 24, 4, 40, 64, 384),
    init_method_std=0.3,
    model_family="t5",
    further=(
        ("decoder_num_layers", 1),
        ("relative_attention_max_distance", 128),
        ("relative_attention_num_buckets", 32),
        ("t5_feed_forward", "gelu"),
        ("t5_head_bias", True),
        ("t5_scaled_attention", True),
        ("t5_scaled_head", False),
    ),
)


def new_model() -> T5Model:
    """Make a model with random weights that writes letters, others for each source."""
    model = T5Model(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
    model.initialize(7)
    assert model.head_bias is not None
    with torch.no_grad():
        model.head_bias[:32] = model.head_bias[128:] = -100
        # Random states of the encoder are nearly the same for all sources.
        for block in model.decoder_blocks:
            block.cross_attention.query.weight *= 20
            block.cross_attention.output.weight *= 20
    return model.eval()


@pytest.fixture(scope="module")
def encoder() -> Iterator[Server]:
    """A server of such a model."""
    loaded = LoadedModel(new_model(), ByteTokenizer(), Path("iter_0000001"), PLAIN)
    with running_server(loaded) as made:
        yield made


@torch.no_grad()
def answer(server: Server, prompt: str, count: int) -> str:
    """Return the most probable answer, each token by a pass over all before."""
    model: Any = server.models["tiny"].loaded.model
    memory = model.memory(torch.tensor([[*prompt.encode(), 256]]))
    tokens = [0]
    for _ in range(count):
        hidden = model.hidden(torch.tensor([tokens]), memory)
        tokens.append(int(model.logits(hidden)[0, -1, :257].argmax()))
    return bytes(tokens[1:]).decode()


def test_answers(encoder: Server) -> None:
    """Several prompts, by text, by ids and empty, have their own answers, and are counted."""
    prompts = ["Hello", "another prompt", ""]
    body = {"prompt": prompts, "n": 2, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    reply = encoder.ask(PATH, body)
    assert reply.status == 200, reply.message
    texts = [one["text"] for one in reply.json["choices"]]
    wanted = [answer(encoder, prompt, 8) for prompt in prompts]
    assert texts == [text for text in wanted for _ in range(2)]
    assert len(set(wanted)) > 1
    assert reply.json["choices"][0]["logprobs"]["text_offset"] == list(range(8))
    # Each source has its end.
    assert reply.json["usage"]["prompt_tokens"] == 6 + 15 + 1
    by_ids = encoder.ask(PATH, body | {"prompt": list(b"Hello"), "n": 1})
    assert [one["text"] for one in by_ids.json["choices"]] == wanted[:1]
    assert encoder.models["tiny"].service.statistics.prompt_tokens >= 2 * 22


def test_a_stream(encoder: Server) -> None:
    """Its parts are the text, with their probabilities."""
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "stream": True, "logprobs": 0}
    reply = encoder.ask(PATH, body | {"stream_options": {"include_usage": True}})
    parts = [one["choices"][0] for one in reply.events if one["choices"]]
    assert "".join(part["text"] for part in parts) == answer(encoder, "Hello", 8)
    offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
    assert offsets == list(range(8))
    assert reply.events[-1]["usage"]["prompt_tokens"] == 6


def test_positions(encoder: Server) -> None:
    """A prompt may take all of the encoder's positions, and an answer all of the decoder's."""
    body = {"prompt": "x" * 63, "max_tokens": None, "temperature": 0}
    reply = encoder.ask(PATH, body)
    assert reply.status == 200, reply.message
    assert reply.json["usage"] == {
        "prompt_tokens": 64,
        "completion_tokens": 64,
        "total_tokens": 128,
    }
    long = encoder.ask(PATH, body | {"prompt": "x" * 64})
    assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "`prompt` has 65 tokens; the model has 64 positions" in long.message
    many = encoder.ask(PATH, body | {"max_tokens": 65})
    assert many.status == 400
    assert "`max_tokens` is 65; the model has 64 positions, which leave room for 64" in many.message


def test_what_continues_is_refused(encoder: Server) -> None:
    """A conversation, `echo` and Megatron-LM's interface are refused, each with the reason."""
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    reply = encoder.ask("/v1/chat/completions", chat)
    assert (reply.status, reply.json["error"]["code"]) == (400, "no_chat_template")
    assert "answers each prompt by itself" in reply.message
    for path, body in ((PATH, {"prompt": "a", "echo": True}), ("/api", {"prompts": ["a"]})):
        reply = encoder.ask(path, body)
        assert reply.status == 400
        assert "answers a prompt instead of continuing it" in reply.message
    for kind in (PATH, "/api"):
        assert encoder.ask(kind, {}).status == 400, "the fields are checked as well"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with such a model."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    tensors = {f"model.{name}": tensor for name, tensor in new_model().state_dict().items()}
    save_checkpoint(folder / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(ByteTokenizer(), folder / "tokenizer")
    return folder


@pytest.mark.distributed
def test_processes(run: Path, encoder: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes that divide the heads give the answers of one."""
    two = ("--tensor-model-parallel-size", "2", "--nproc-per-node", "2")
    with served("--load", str(run), *two) as (_, port, _lines):
        capsys.readouterr()
        for prompt in ("Hello", "another prompt"):
            flags = ["--prompt", prompt, "--tokens", "9", "--temperature", "0"]
            assert ask([f"localhost:{port}", *flags]) == 0
            assert capsys.readouterr().out == answer(encoder, prompt, 9) + "\n"


def test_the_commands(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`lmcore serve` loads such a run, says so of it, and `lmcore ask` shows its answers."""
    template = tmp_path / "template"
    template.write_text("{{ messages }}", encoding="utf-8")
    # It is refused before weights are read.
    monkeypatch.setattr("lmcore.inference.load.allocate", Mock(side_effect=AssertionError))
    with pytest.raises(ConfigError, match="`--chat-template` cannot be used with the model"):
        serve(["--load", str(run), "--device", "cpu", "--chat-template", str(template)])
    with served("--load", str(run)) as (_, port, _lines):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v1/models")
        (model,) = json.loads(connection.getresponse().read())["data"]
        connection.close()
        assert model["facts"]["family"] == "T5"
        assert model["facts"]["answers"] is True
        assert model["facts"]["chat"] is False
        capsys.readouterr()
        flags = ["--prompt", "Hello", "--tokens", "9", "--temperature", "0"]
        assert ask([f"localhost:{port}", *flags]) == 0
        assert len(capsys.readouterr().out) == 10
