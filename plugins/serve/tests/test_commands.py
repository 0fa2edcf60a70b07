"""`lmcore serve` and `lmcore ask` as processes: start, answer, stop."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from broken_backend import HINT, WHAT, WHY, install_broken_backend

from lmcore.base.errors import ConfigError, RunError
from lmcore.cli.main import main
from lmcore.model.checkpoint_format import formats
from lmcore_serve.command.ask import run as ask
from lmcore_serve.command.serve import run as serve

from .conftest import save_run, served


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `first` and `second`."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("first", "second")):
        save_run(folder / name, seed)
    return folder


def test_two_models_and_the_client(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both answer by name; SIGTERM ends the server with the status 0."""
    directories = [str(runs / name) for name in ("first", "second")]
    with served("--compare", *directories) as (process, port, lines):
        texts = []
        for name in ("first", "second"):
            flags = ["--prompt", "Hello", "--tokens", "9", "--temperature", "0", "--model", name]
            assert ask([f"localhost:{port}", *flags]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] != texts[1]
        assert all(len(text) == 10 for text in texts)
        with pytest.raises(RunError, match="no chat template"):
            ask([f"localhost:{port}", "--prompt", "Hello", "--chat"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert any("stopping" in line for line in lines)
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["status"] for one in logged] == [200, 200, 400]


def test_piped_lines(runs: Path) -> None:
    """Each line of standard input gets an answer on a line."""
    with served("--load", str(runs / "first"), "--access-log", "none") as (_, port, lines):
        command = [sys.executable, "-m", "lmcore", "ask", f"localhost:{port}", "--tokens", "3"]
        done = subprocess.run(
            [*command, "--temperature", "0"],
            input=b"One\nTwo\n",
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert [len(line) for line in done.stdout.split(b"\n")] == [3, 3, 0]
        wrong = subprocess.run(
            command, input=b"\xff\n", capture_output=True, check=False, timeout=60
        )
        assert wrong.returncode == 2
        assert b"not UTF-8" in wrong.stderr
    assert not any(line.startswith("{") for line in lines)


def test_stopping_answers_first(runs: Path) -> None:
    """After one signal a running request is answered, after two it ends with an error."""
    for signals, answered in ((1, True), (2, False)):
        with served("--load", str(runs / "first")) as (process, port, lines):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            # The most probable token never ends the text: it lasts until the signal is handled.
            asked = {"prompt": "a", "max_tokens": 1500 if answered else 4000, "temperature": 0}
            body = json.dumps({**asked, "stream": True})
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            begin = reply.read1(100)
            assert begin.startswith(b"data: ")
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                while not any("stopping when" in line for line in lines):
                    assert reply.read1(100)  # two signals at once may arrive as one
            end = reply.read()
            assert end.endswith(b"data: [DONE]\n\n")
            assert (b'"code": "stopping"' in end) is not answered
            assert process.wait(60) == 0
            connection.close()


@pytest.mark.parametrize(
    "flags, problem",
    [
        ([], "`--load`"),
        (["--compare", "a"], "`--compare` has 1 directory"),
        (["--tok", "X"], "unknown flag `--tok`"),
        (["--load", "RUN", "--compare", "a", "b"], "`--load`"),
        (["--load", "nothing-here"], "nothing-here"),
        (["--load", "RUN", "--port", "65536"], "--port"),
        (["--load", "RUN", "--host", "192.0.2.1"], "cannot listen"),
        (["--load", "RUN", "--api-key-file", "missing"], "cannot read"),
        (["--load", "RUN", "--api-key-file", "EMPTY"], "has no keys"),
        (["--load", "RUN", "--access-log", "no/such/folder/log"], "cannot write"),
        (["--load", "RUN", "--num-threads", "99999"], "--num-threads"),
        (["--load", "RUN", "--ckpt-step", "77"], "77"),
        (["--load", "RUN", "--compare", "RUN", "RUN"], "exclude each other"),
        (["--load", "RUN", "--host", "192.0.2.1"], "an address of this machine"),
        (["--load", "RUN", "--inference-max-requests", "0"], "expected an integer >= 1"),
        (["--load", "RUN", "--chat-template", "missing"], "cannot read the chat template"),
        (["--load", "RUN", "--chat-template", "BROKEN"], "is no valid template"),
    ],
)
def test_wrong_flags(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    problem: str,
) -> None:
    """Each problem is named before a model is loaded."""
    monkeypatch.setattr("lmcore.inference.load.load_model", None)
    empty = tmp_path / "empty"
    empty.write_text("# no keys\n\n")
    broken = tmp_path / "broken"
    broken.write_text("{% for")
    named = {"RUN": str(runs / "first"), "EMPTY": str(empty), "BROKEN": str(broken)}
    argv = [named.get(flag, flag) for flag in flags]
    if "--port" not in argv:
        argv += ["--port", "0"]
    with pytest.raises(Exception, match=re.escape(problem)):
        serve([*argv, "--device", "cpu"])


def test_nothing_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server takes a checkpoint of any format, and says what it looked for."""
    assert main(["serve", "--load", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"no checkpoint in `{tmp_path}`\nwhy: it is empty; looked for" in said
    for one in formats().values():
        assert f"  {one.title}: {one.files}\n" in said


def test_a_backend_that_torch_cannot_load(runs: Path, tmp_path: Path) -> None:
    """The message names its package and blames no plugin: no traceback."""
    flags = ["--device", "cpu", "--load", str(runs / "first"), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "lmcore", "serve", *flags],
        env=install_broken_backend(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    message = done.stderr[done.stderr.index("error: ") :]
    assert message.startswith(f"error: {WHAT}\nwhy: {WHY}\n\nhint: {HINT}")
    assert "Traceback" not in done.stderr


def test_flags_of_megatrons_server(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are used or named as without effect; flags of the model have to match the checkpoint."""
    argv = ["--load", str(runs / "first"), "--port", "0", "--device", "cpu"]
    given = "--inference-max-requests 3 --micro-batch-size 1 --seed 42 --temperature 1.0"
    started = []
    monkeypatch.setattr(
        "lmcore_serve.server.serve", lambda state, *_rest: started.append(state.first)
    )
    caplog.set_level("INFO")
    assert serve([*argv, *given.split(), "--num-layers", "1"]) == 0
    (model,) = started
    assert model.service.max_texts == 3 + 128
    assert "--micro-batch-size" in caplog.text
    with pytest.raises(ConfigError, match="`--num-layers 9` contradicts the checkpoint"):
        serve([*argv, "--num-layers", "9"])


def test_a_taken_port(runs: Path) -> None:
    """The error names the port and the way out."""
    with served("--load", str(runs / "first")) as (_, port, _lines):
        argv = ["--load", str(runs / "first"), "--port", str(port), "--device", "cpu"]
        with pytest.raises(ConfigError, match="--port 0"):
            serve(argv)
