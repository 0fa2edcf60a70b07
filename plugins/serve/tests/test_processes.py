"""`lmcore serve` with a model that is divided over processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lmcore.model.shape import ModelShape

from .conftest import save_run, served

SHAPE = ModelShape(
    4,
    32,
    4,
    48,
    64,
    384,
    init_method_std=0.3,
    num_query_groups=2,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)
TWO = ("--tensor-model-parallel-size", "2", "--nproc-per-node", "2")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of a Llama with random weights."""
    return str(save_run(tmp_path_factory.mktemp("runs") / "llama", 3, SHAPE))


def completion(port: int) -> tuple[int, Any]:
    """Ask for a text; give the status and the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": "Hello", "max_tokens": 5, "temperature": 0})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    found = reply.status, json.loads(reply.read())
    connection.close()
    return found


def test_serve(run: str) -> None:
    """A server answers; a signal to the command ends all processes in order."""
    with served("--load", run, *TWO) as (process, port, lines):
        first, second = completion(port), completion(port)
        assert first[0] == 200
        assert first[1]["choices"] == second[1]["choices"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, lines


@pytest.mark.full
def test_a_lost_process_ends_the_server(run: str) -> None:
    """A rank that was killed ends the command with an error."""
    with served("--load", run, *TWO) as (process, port, lines):
        assert completion(port)[0] == 200
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("the kernel does not list the children of a process")
        # The children are in the order of their ranks.
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        assert process.wait(60) != 0
    assert any("killed" in line.lower() or "SIGKILL" in line for line in lines)
