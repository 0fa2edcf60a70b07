"""Measures `lmcore serve`: many clients beside one after another, fairness, leaks and errors.

    python benchmarks/serve.py --clients 16 --requests 10000 --num-threads 2

A server is started on a GPT-2 124M with random weights.  Then:

- `--clients` clients at a time send `--rounds` requests each, with prompts and answers of mixed
  lengths, and the same requests are sent one after another: tokens/s of both, and their ratio;
- of the concurrent requests the time per token of the slowest, relative to the median: the time
  from the first token to the last, over their number;
- `--requests` short requests by all clients: errors, and the growth of the server's memory from
  a tenth of them to the end.

`--json FILE` keeps every figure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

VOCABULARY = 50256
POSITIONS = 1024


@dataclass(frozen=True)
class Request:
    """A prompt of random tokens, and the number of tokens to generate."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True)
class Answer:
    """Times of a request in seconds, and the tokens that it got.

    Attributes:
        first: Time of the first token, from the start of the request.
        last: Time of the last token.
        tokens: Number of tokens.
    """

    first: float
    last: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Time per token after the first."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


def save_model(
    directory: Path, shape: Sequence[int], tokenizer: Any, *, rows: int, positions: int
) -> None:
    """Write a run directory with random weights and a tokenizer."""
    from lmcore.checkpoint import save_checkpoint
    from lmcore.contract import OP_SPECS, OpTable
    from lmcore.data.tokenizer.saved import save_tokenizer
    from lmcore.families.gpt.model import GPT
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

    layers, hidden, heads = shape
    sizes = ModelShape(layers, hidden, heads, 4 * hidden, positions, rows)
    model = GPT(sizes, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(1)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "checkpoints", 1, tensors, {}, model_shape=sizes.to_dict())
    save_tokenizer(tokenizer, directory / "tokenizer")


@contextmanager
def served(run: Path, asked: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Run a server; give its port and its process."""
    flags = ["--load", str(run), "--port", "0", "--device", "cpu", "--access-log", "none"]
    flags += ["--precision", asked.precision, "--num-threads", str(asked.num_threads)]
    flags += ["--max-requests", str(asked.clients), "--max-waiting", "4096"]
    flags += ["--quantization", asked.quantization] if asked.quantization else []
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcore", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(asked.num_threads)},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"serving .*:(\d+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait(60)


def requests(count: int, seed: int, *, short: bool = False) -> list[Request]:
    """Return requests of mixed lengths."""
    source = random.Random(seed)
    longest = 8 if short else 200
    return [
        Request(
            [source.randrange(VOCABULARY) for _ in range(source.randint(4, longest))],
            2 if short else source.choice((16, 32, 64, 96)),
        )
        for _ in range(count)
    ]


def ask(port: int, request: Request) -> Answer:
    """Send a request, read its stream, and return the times of its tokens."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "prompt": request.prompt,
        "max_tokens": request.tokens,
        "temperature": 0,
        "logprobs": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.read(500)!r}")
    times, tokens, ended = [], 0, False
    for line in reply:
        if line == b"data: [DONE]\n":
            ended = True
        elif line.startswith(b"data: "):
            (choice,) = json.loads(line[6:])["choices"]
            made = len((choice["logprobs"] or {"tokens": []})["tokens"])
            tokens += made
            if made:
                times.append(time.perf_counter() - begin)
    connection.close()
    if not ended or not times:
        raise RuntimeError("the stream ended early")
    return Answer(times[0], times[-1], tokens)


def together(port: int, wanted: Sequence[Request], clients: int) -> tuple[float, list[Answer]]:
    """Send requests by several clients; return the time and the answers."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda one: ask(port, one), wanted))
    return time.perf_counter() - begin, answers


def memory(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def throughput(port: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Compare concurrent requests with the same ones one after another."""
    together(port, requests(asked.clients, 1), asked.clients)  # warm-up
    rates: dict[str, list[float]] = {"together": [], "one after another": []}
    slowest = []
    for number in range(asked.repeats):
        wanted = requests(asked.clients * asked.rounds, 100 + number)
        for name, clients in (("together", asked.clients), ("one after another", 1)):
            seconds, answers = together(port, wanted, clients)
            rates[name].append(sum(one.tokens for one in answers) / seconds)
            if clients > 1:
                times = [one.per_token for one in answers]
                slowest.append(max(times) / statistics.median(times))
    pairs = zip(rates["together"], rates["one after another"], strict=True)
    ratio = statistics.median(left / right for left, right in pairs)
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.1f} tokens/s")
    print(f"ratio {ratio:.2f}; slowest request {statistics.median(slowest):.2f}x the median")
    return {"tokens/s": rates, "ratio": ratio, "slowest": slowest}


def endurance(port: int, pid: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Send many short requests; count errors and measure the growth of the server's memory."""
    wanted = requests(asked.requests, 7, short=True)
    tenth = max(asked.requests // 10, 1)
    errors: list[str] = []

    def one(request: Request) -> None:
        try:
            ask(port, request)
        except (OSError, RuntimeError, ValueError) as error:
            errors.append(str(error))

    with ThreadPoolExecutor(asked.clients) as pool:
        list(pool.map(one, wanted[:tenth]))
        before = memory(pid)
        list(pool.map(one, wanted[tenth:]))
    grown = memory(pid) - before
    print(
        f"{len(errors)} errors in {asked.requests} requests; memory {before:.0f} MB {grown:+.1f} MB"
    )
    for error in errors[:3]:
        print(f"  {error}")
    return {"errors": len(errors), "memory MB": before, "growth MB": grown}


def main() -> None:
    """Start the server, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--shape", type=int, nargs=3, default=[12, 768, 12], metavar="N")
    parser.add_argument("--json", type=Path)
    asked = parse(
        parser,
        clients=2,
        rounds=1,
        repeats=1,
        requests=10,
        num_threads=1,
        shape=[1, 32, 2],
    )
    check(asked)
    from lmcore.data.tokenizer import NullTokenizer

    with tempfile.TemporaryDirectory() as folder:
        run, tokenizer = Path(folder) / "run", NullTokenizer(VOCABULARY)
        save_model(run, asked.shape, tokenizer, rows=50304, positions=POSITIONS)
        with served(run, asked) as (port, pid):
            figures = {**throughput(port, asked), **endurance(port, pid, asked)}
    if asked.json is not None:
        asked.json.write_text(json.dumps(marked(figures, asked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
