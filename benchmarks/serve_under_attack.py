"""Measures what clients can do to `lmcore serve`: latency, memory and log lines under attack.

    python benchmarks/serve_under_attack.py --rounds 3 --connections 1000

A server of a tiny model with random weights is started on the loopback address, with its default
limits.  The latency of `/health`, over a new connection each time, and the server's resident
memory are measured three times:

- usual: nobody else asks (the process that asks for `/health` does nothing else);
- bad requests: bodies just below the size limit that are expensive to parse or to check, and JSON
  schemas that are expensive to compile, each `--rounds` times by `--clients` clients together;
- slow connections: `--connections` connections that send half a head and then nothing.

It prints the status of each bad request and the median time to its reply; of each attack the median
and the maximum of the latency beside the usual ones, the requests to `/health` that failed, the
peak memory beside the usual memory, and the lines that the server logged.  No attack lasts longer
than `--most-seconds`.  `--json FILE` keeps every figure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse
from serve import memory, save_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for one in messages %}{{ one.content }}\n{% endfor %}"
SHAPE = (1, 32, 2)
POSITIONS = 256
PAUSE_SECONDS = 0.01
"""Time between two requests to `/health`."""
BEGIN_SECONDS = 2
"""Time that the process that asks for `/health` has to start."""
REPLY_SECONDS = 60
START_SECONDS = 120
OTHER_FILES = 128
"""File descriptors of this script that are no slow connections."""


@dataclass(frozen=True)
class Server:
    """A running server: its port, its process and the file of its standard error."""

    port: int
    pid: int
    log: Path

    @property
    def log_lines(self) -> int:
        """Number of lines that it has logged."""
        return self.log.read_bytes().count(b"\n")


@dataclass(frozen=True)
class Watched:
    """Latencies, memory and log lines during a time, as a client of `/health` saw them.

    Attributes:
        latencies: Seconds of each request that was answered by 200.
        failed: Number of the others.
        peak: Largest resident memory of the server in MB.
        log_lines: Lines that the server logged.
    """

    latencies: list[float]
    failed: int
    peak: float
    log_lines: int

    @property
    def median(self) -> float:
        """Median of the latencies in milliseconds."""
        return 1000 * statistics.median(self.latencies or [float("nan")])

    @property
    def longest(self) -> float:
        """Maximum of the latencies in milliseconds."""
        return 1000 * max(self.latencies, default=float("nan"))


def bad_requests(scale: float) -> dict[str, tuple[str, bytes]]:
    """Return the path and the body of each bad request by name; *scale* 1 fills 4 MiB."""

    def many(item: bytes, count: int) -> bytes:
        return b",".join([item] * max(int(count * scale), 1))

    def numbered(count: int) -> bytes:
        return b",".join(b'"%d":1' % one for one in range(max(int(count * scale), 1)))

    def schema(value: bytes) -> tuple[str, bytes]:
        form = b'{"type": "json_schema", "json_schema": {"name": "a", "schema": ' + value + b"}}"
        return COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "response_format": ' + form + b"}"

    depth = max(int(40_000 * scale), 200)
    text = b"a" * int((4 * 2**20 - 1000) * scale)
    parts = b'{"messages": [{"role": "user", "content": [' + many(b"{}", 1_300_000) + b"]}]}"
    bias = b'{"prompt": "a", "logit_bias": {' + numbered(300_000) + b"}}"
    nested = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
    return {
        "nulls": (COMPLETIONS, b'{"prompt": [' + many(b"null", 830_000) + b"]}"),
        "empty lists": (COMPLETIONS, b'{"prompt": [' + many(b"[]", 1_300_000) + b"]}"),
        "empty parts of a message": (CHAT, parts),
        "unknown fields": (COMPLETIONS, b"{" + numbered(370_000) + b"}"),
        "logit_bias": (COMPLETIONS, bias),
        "nested lists": (COMPLETIONS, nested),
        "schema of itself": schema(b'{"$ref": "#"}'),
        "schema of many choices": schema(
            b'{"anyOf": [' + many(b'{"type": "string", "maxLength": 9}', 5000) + b"]}"
        ),
        "schema of a long text": schema(b'{"enum": ["' + text + b'"]}'),
    }


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Run a server with its default limits until the end; its log is a file in *folder*."""
    from lmcore.data.tokenizer import ByteTokenizer

    save_model(folder / "run", SHAPE, ByteTokenizer(), rows=384, positions=POSITIONS)
    (folder / "template").write_text(TEMPLATE, encoding="utf-8")
    flags = ["--load", str(folder / "run"), "--port", "0", "--device", "cpu", "--num-threads", "1"]
    flags += ["--chat-template", str(folder / "template")]
    log = folder / "log"
    command = [sys.executable, "-m", "lmcore", "serve", *flags]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream)
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := re.search(r"serving .*:(\d+)\n", log.read_text("utf-8"))):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start\n{log.read_text('utf-8')}")
            time.sleep(0.05)
        yield Server(int(found[1]), process.pid, log)
        if process.poll() is not None:
            raise SystemExit(f"the server ended\n{log.read_text('utf-8')[-2000:]}")
    finally:
        process.terminate()
        process.wait(60)


def ask(port: int, path: str, body: bytes | None = None) -> tuple[int, float]:
    """Send a request over a new connection; return the status and the seconds to the reply."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_SECONDS)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status, time.perf_counter() - begin
    finally:
        connection.close()


def ask_for_health(port: int, ends: Event, found: Connection) -> None:
    """Ask for `/health` again and again; send the latencies and the number of failures at the end.

    It runs in a separate process, so that what the attacking clients compute does not delay it.
    """
    latencies: list[float] = []
    failed = 0
    while not ends.is_set():
        try:
            status, seconds = ask(port, "/health")
        except (OSError, http.client.HTTPException):
            status, seconds = 0, 0.0
        if status == 200:
            latencies.append(seconds)
        else:
            failed += 1
        time.sleep(PAUSE_SECONDS)
    found.send((latencies, failed))


def watch(server: Server, act: Callable[[], None]) -> Watched:
    """Ask for `/health` again and again while a function runs."""
    peak, before = memory(server.pid), server.log_lines
    processes = multiprocessing.get_context("spawn")
    ends = processes.Event()
    receiver, sender = processes.Pipe(duplex=False)
    asking = processes.Process(target=ask_for_health, args=(server.port, ends, sender))
    asking.start()

    def sample() -> None:
        nonlocal peak
        while not ends.wait(PAUSE_SECONDS):
            peak = max(peak, memory(server.pid))

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        try:
            time.sleep(BEGIN_SECONDS)
            act()
        finally:
            ends.set()
        sampling.result()
    latencies, failed = receiver.recv()
    asking.join()
    return Watched(latencies, failed, peak, server.log_lines - before)


def send_bad_requests(
    port: int,
    bodies: dict[str, tuple[str, bytes]],
    asked: argparse.Namespace,
    found: dict[str, list[tuple[int, float]]],
) -> None:
    """Send every bad request; put the status and the seconds of each reply into *found*."""
    end = time.monotonic() + asked.most_seconds
    with ThreadPoolExecutor(asked.clients) as pool:
        for name, (path, body) in bodies.items():
            for _ in range(asked.rounds):
                if time.monotonic() > end:
                    return
                asking = [pool.submit(ask, port, path, body) for _ in range(asked.clients)]
                for one in asking:
                    try:
                        reply = one.result()
                    except (OSError, http.client.HTTPException):
                        reply = (0, float("nan"))  # the connection ended without a reply
                    found.setdefault(name, []).append(reply)


def hold_connections(port: int, count: int, seconds: float, found: dict[str, int]) -> None:
    """Open connections, send half a head on each, and keep them; count those still open."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            with suppress(OSError):
                one = socket.create_connection(("127.0.0.1", port), 10)
                stack.callback(one.close)
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
                opened.append(one)
        found["opened"] = len(opened)
        time.sleep(seconds)
        found["open at the end"] = sum(map(is_open, opened))


def is_open(connection: socket.socket) -> bool:
    """Return whether the other side has not ended a connection."""
    connection.setblocking(False)  # noqa: FBT003 -- the argument has no name
    try:
        while connection.recv(4096):
            pass  # a reply, such as 503, before the end
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def allowed_connections(wanted: int) -> int:
    """Raise this process's limit of open files for *wanted* connections; return how many it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        print(f"{soft - OTHER_FILES} connections instead of {wanted}: `ulimit -Hn` is {hard}")
    return min(wanted, soft - OTHER_FILES)


def show(name: str, seen: Watched, usual: Watched) -> dict[str, Any]:
    """Print what was seen during an attack beside the usual; return it for JSON."""
    print(
        f"{name}: /health median {seen.median:.1f} ms (usual {usual.median:.1f}), "
        f"maximum {seen.longest:.1f} ms (usual {usual.longest:.1f}), {seen.failed} of "
        f"{len(seen.latencies) + seen.failed} failed; peak memory {seen.peak:.0f} MB (usual "
        f"{usual.peak:.0f}); {seen.log_lines} log lines",
        flush=True,
    )
    return {
        "median ms": seen.median,
        "maximum ms": seen.longest,
        "requests": len(seen.latencies) + seen.failed,
        "failed": seen.failed,
        "peak MB": seen.peak,
        "log lines": seen.log_lines,
    }


def show_replies(found: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """Print the statuses and the median time of each bad request; return them for JSON."""
    rows = {}
    for name in bad_requests(0):
        replies: Sequence[tuple[int, float]] = found.get(name, ())
        if not replies:
            print(f"{name}: not sent, `--most-seconds` was over")
            continue
        statuses = sorted({status for status, _ in replies})
        seconds = statistics.median(seconds for _, seconds in replies)
        shown = ", ".join(str(status or "no reply") for status in statuses)
        print(f"{name}: {shown} after {1000 * seconds:.0f} ms")
        rows[name] = {"statuses": statuses, "median ms": 1000 * seconds}
    return rows


def measure(server: Server, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure the usual state and both attacks."""
    for _ in range(10):
        ask(server.port, "/health")
        ask(server.port, COMPLETIONS, b'{"prompt": "a", "max_tokens": 2}')  # warm-up
    usual = watch(server, lambda: time.sleep(asked.seconds))
    figures = {"usual": show("usual", usual, usual)}

    replies: dict[str, list[tuple[int, float]]] = {}
    bodies = bad_requests(asked.scale)  # made before, for that would delay `/health` here
    seen = watch(server, lambda: send_bad_requests(server.port, bodies, asked, replies))
    figures["replies"] = show_replies(replies)
    figures["bad requests"] = show("bad requests", seen, usual)

    count, held = allowed_connections(asked.connections), dict[str, int]()
    seconds = min(asked.hold_seconds, asked.most_seconds)
    seen = watch(server, lambda: hold_connections(server.port, count, seconds, held))
    figures["slow connections"] = held | show("slow connections", seen, usual)
    print(f"slow connections opened {held['opened']}, open at the end {held['open at the end']}")
    return figures


def main() -> None:
    """Start the server, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that a bad request is sent")
    parser.add_argument("--clients", type=int, default=2, help="clients that send it together")
    parser.add_argument("--connections", type=int, default=1000, help="slow connections")
    parser.add_argument("--seconds", type=float, default=5, help="duration of the usual state")
    parser.add_argument("--hold-seconds", type=float, default=15, help="of slow connections")
    parser.add_argument("--most-seconds", type=float, default=240, help="of each attack")
    parser.add_argument("--scale", type=float, default=1, help="size of bad requests; 1: 4 MiB")
    parser.add_argument("--json", type=Path)
    asked = parse(
        parser, rounds=1, clients=1, connections=20, seconds=0.3, hold_seconds=0.3, scale=0.25
    )
    check(asked)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
        figures = measure(server, asked)
    if asked.json is not None:
        asked.json.write_text(json.dumps(marked(figures, asked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
