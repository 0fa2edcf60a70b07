"""Every benchmark checks what it measures, and runs at toy size: its table, JSON or report."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from suite import warm

pytestmark = pytest.mark.timeout(600)  # some start a dozen processes, each of which imports torch
LONGEST = 580
TOY = "toy size: not a measurement"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EXEMPT = {
    "carry.py": "makes and installs wheels",
    "equal_results.py": "compares results, not times",
    "data_peers.py": "is Megatron's part, for a Python that need not have lmcore",
}
"""Commands that do not measure lmcore."""
TEXT_FLAGS = "--vocab-file {vocab} --merge-file {merges} --corpus {corpus}"
OPS = ("attention", "layer_norm", "rms_norm", "linear", "bias_gelu", "swiglu", "bias_dropout_add")
OPS += ("scaled_masked_softmax", "rotary_embedding", "cross_entropy", "linear_cross_entropy")
OPTIMIZERS = ("adam", "sgd", "lamb", "muon", "sophia", "adopt", "shampoo", "schedulefree")
GPT2_ROW = "GPT-2 12 x 768, batch 1 x 512, fp32"
LLAMA_ROW = "Llama 12 x 768, batch 1 x 512, fp32, no dropout"
STEPS = ("url", "fix", "length", "exact", "near", "ngram", "shuffle")


@dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
        script: Name of the file.
        flags: Flags after `--toy`, in one line, with the fields of `Text` in braces, and `{out}`.
        rows: Beginnings of output lines, before a figure.
        peers: The same of contenders that may not be installed: each has a row, or is named.
        error: End of the output if the script cannot measure here.
    """

    script: str
    flags: str = ""
    rows: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        what = re.sub(r"--|\{.*?\}", "", self.flags.replace(TEXT_FLAGS, ""))
        return " ".join([self.script, *what.split()])


TABLES = (
    Run("train_step", "", ("lmcore", "lmcore-bare"), ("transformers", "megatron-core")),
    Run("parallel", "--layouts ddp", ("ddp",)),
    Run("parallel", "--layouts zero3", ("zero3",)),
    Run("parallel", "--layouts pp --overhead", ("pp",)),
    Run("parallel", "--start", ("1 processes:", "2 processes:", "ratio:")),
    Run(
        "optimizers",
        rows=(*OPTIMIZERS, "adam (library)", "sgd (library)", "shampoo's roots:"),
        peers=("schedulefree (library)", "adam8bit (library)"),
    ),
    Run(
        "startup",
        # Compared with `import torch` on the same machine, at the same time.
        "--turns 3 --most 1.5",
        rows=("lmcore --help", "lmcore train --help", "import_torch", "first_step", "whole"),
        peers=("torchrun --help", "accelerate --help"),
    ),
    Run(
        "checkpoint",
        rows=(
            *("save: torch.save + fsync", "save: dcp.save, 1 thread", "save: dcp.save, 2 threads"),
            *("save: lmcore", "load: torch.load", "load: dcp.load", "load: lmcore, unverified"),
            *("load: lmcore", "verify: lmcore", "save: raw write + fsync", "load: raw read, cold"),
            *("convert: lmcore to huggingface", "convert: huggingface to lmcore"),
        ),
    ),
    Run("library", "--parts starts cost", ("bare", "lmcore"), ("fabric", "accelerate")),
    Run("library", "--parts kernels", peers=("kernels in a model of transformers",)),
    Run(
        "generation",
        rows=(
            *("batch 1, tokens/s: lmcore", "batch 2, tokens/s: lmcore", "first token after 40"),
            "one token at a time reads",
        ),
    ),
    Run("serve", rows=("together:", "one after another:", "ratio", "0 errors in 10 requests;")),
    Run(
        "serve_under_attack",
        rows=(
            *("usual: /health median", "bad requests: /health median", "nulls: 400 after"),
            *("empty lists: 400 after", "empty parts of a message: 400 after"),
            *("unknown fields: 400 after", "logit_bias: 400 after", "nested lists: 400 after"),
            *("schema of itself: 400 after", "schema of many choices: 400 after"),
            *("schema of a long text: 400 after", "slow connections: /health median"),
            *("slow connections opened 20, open at the end",),
        ),
    ),
    Run(
        "quantization", rows=tuple(f"{one}: perplexity" for one in ("fp32", "bf16", "int8", "int4"))
    ),
    Run(
        "retrieval",
        rows=("blocks, lmcore", "searches, lmcore exact"),
        peers=("blocks, transformers sorted", "searches, Faiss flat"),
    ),
    Run(
        "train_step",
        "--family t5 --contenders lmcore transformers",
        rows=("lmcore",),
        peers=("transformers",),
    ),
    Run(
        "train_step",
        "--family llama --contenders lmcore transformers",
        rows=("lmcore",),
        peers=("transformers",),
    ),
    Run(
        "generation",
        "--family t5",
        rows=("batch 1, tokens/s: lmcore", "batch 2, tokens/s: lmcore"),
    ),
    Run(
        "evaluate",
        "--vocab-file {vocab} --merge-file {merges}",
        rows=tuple(
            f"{one}, lmcore:" for one in ("wikitext2", "lambada_strict", "arc_easy", "openbookqa")
        ),
        peers=("lm-eval",),
    ),
    Run(
        "data_index",
        rows=(
            *("sample index", "whole index", "blend", "sentences", "cold", "warm"),
            *("read in order", "read shuffled"),
        ),
    ),
    Run("kernels", "--device cpu", tuple(f"{op} reference" for op in OPS)),
    Run(
        "data",
        f"{TEXT_FLAGS} --bert-vocab-file {{bert}}",
        (
            *("lmcore data prepare", "lmcore, the small input", "lmcore, BPE, one worker"),
            *("lmcore, WordPiece, one worker", "tokenizers, in memory"),
            *("lmcore, WordPiece", "tokenizers, WordPiece, in memory"),
        ),
        (
            *("Megatron fast path", "Megatron default, small", "gigatoken", "tokie", "tiktoken"),
            "lmcore, WordPiece, sentences",
        ),
    ),
    Run(
        "data_clean",
        "--corpus {corpus} --tasks {corpus}",
        (*STEPS, "lmcore", "lmcore, numpy"),
        ("language", "datasketch", "rensa"),
    ),
    Run(
        "tokenizer_engines",
        TEXT_FLAGS,
        ("lmcore", "tokenizers", "every character alone lmcore", "corpora tokenizers"),
        ("gigatoken", "tokie", "tiktoken"),
    ),
    Run("device_loops", "bare", ('{"seconds":',)),
    Run("device_loops", "matmul", ('{"flops":',)),
    Run("device_loops", "transformers", peers=("{",)),
)
JSON = (
    Run("train_step", "--contenders lmcore --json", ("shape", "threads", "rows")),
    Run("data_index", "--json", ("sample index", "read shuffled")),
    *(Run("abstraction", f"--only {part} --json", (part,)) for part in ("calls", "steps")),
    Run("abstraction", "--only starts --json", ("starts",)),
)
REPORTS = (
    Run(
        "gpu",
        "--parts speed --models tiny --contenders lmcore restart bare transformers --out {out}",
        ("matmul", "speed.tiny"),
    ),
    Run("xpu", "--parts facts graph --out {out}", ("versions", "what", "doctor", "graph")),
    Run("xpu", "--parts curves --out {out}", ("curves",)),
    Run(
        "device_suite",
        "--parts kernels tests profile --models tiny-llama --out {out}",
        ("kernels", "tests", "profile"),
    ),
)
ERRORS = (
    Run("gpu_kernels", error="no accelerator is here; `--device cpu` works"),
    Run("xla", error="torch_xla is not installed here"),
)
WITH_PEERS = (
    Run("train_step", rows=("transformers", "megatron-core")),
    Run("generation", rows=("batch 1, tokens/s: lmcore",)),
    Run("library", "--parts kernels", (GPT2_ROW, LLAMA_ROW)),
    Run("data_index", rows=("sample index", "whole index", "blend", "sentences")),
    Run("data", TEXT_FLAGS, ("Megatron default, small",)),
)
RUNS = (*TABLES, *JSON, *REPORTS, *ERRORS)


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder with another package called lmcore, which no benchmark is to take."""
    (tmp_path / "here/lmcore").mkdir(parents=True)
    package = tmp_path / "here/lmcore/__init__.py"
    package.write_text('raise RuntimeError("taken from the current folder")\n', encoding="utf-8")
    return tmp_path / "here"


@pytest.fixture
def started(text, elsewhere, tmp_path):
    """Run a benchmark to its end in a folder that has another lmcore; return what it printed."""

    def start(run: Run) -> subprocess.CompletedProcess[str]:
        done = warm.run(
            [
                sys.executable,
                BENCHMARKS / f"{run.script}.py",
                "--toy",
                *arguments(run, text, tmp_path),
            ],
            cwd=elsewhere,
            env={name: one for name, one in os.environ.items() if name != "PYTHONSAFEPATH"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    return start


def arguments(run: Run, text, folder: Path) -> list[str]:
    """Return the flags of a run with its paths."""
    known = {**vars(text), "out": folder / "out"}
    return [word.format(**known) if word[0] == "{" else word for word in run.flags.split()]


@pytest.mark.full
@pytest.mark.parametrize("run", TABLES, ids=str)
def test_tables(started, run):
    """The first line is what it is not; each row has a figure, each peer one or a reason."""
    done = started(run)
    assert done.returncode == 0, done.stderr
    printed = [re.sub(" +", " ", line) for line in done.stdout.splitlines()]
    assert printed[0] == TOY
    for row in run.rows:
        found = [line for line in printed if line.startswith(f"{row} ")]
        assert any(re.search(r"\d", line.removeprefix(row)) for line in found), (row, done.stdout)
    everything = [*printed, *done.stderr.splitlines()]
    for peer in run.peers:
        lines = [line for line in everything if line.startswith(peer)]
        assert any(re.search(r"left out|missing|\d", line) for line in lines), f"{peer}: {lines}"


@pytest.mark.peer
@pytest.mark.parametrize("run", WITH_PEERS, ids=str)
def test_tables_with_peers(started, run):
    """Each installed peer has a row, and its output equals lmcore's."""
    for package in ("megatron", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    test_tables(started, run)


@pytest.mark.full
@pytest.mark.parametrize("run", JSON, ids=str)
def test_json(started, run):
    """Standard output is one JSON object with the note and the figures."""
    done = started(run)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["note"] == TOY
    assert set(run.rows) <= found.keys()
    assert all(found[name] for name in run.rows)


@pytest.mark.full
@pytest.mark.parametrize("run", REPORTS, ids=str)
def test_reports(started, run, tmp_path):
    """Every part that is asked for has a result, none has failed, and the page says toy size."""
    done = started(run)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))
    assert set(run.rows) <= found.keys()
    assert TOY in (tmp_path / "out/report.md").read_text(encoding="utf-8").splitlines()
    for contender, row in found.get("speed.tiny", {}).items():
        assert row.keys() & {"tokens_per_second", "seconds", "missing"}, (contender, row)


@pytest.mark.full
@pytest.mark.parametrize("run", ERRORS, ids=str)
def test_errors(started, run):
    """A script that needs what is not here ends with one line that says so."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    done = started(run)
    assert done.returncode == 1
    assert done.stderr.startswith(run.error), done.stderr


@pytest.mark.full
def test_kernels_beside_triton(started, monkeypatch):
    """With Triton's interpreter the table of kernels can be tried on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = started(Run("gpu_kernels", "--device cpu --ops swiglu"))
    assert done.returncode == 0, done.stderr
    assert "| `swiglu` | tiny |" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "run", {run.script: run for run in RUNS}.values(), ids=lambda run: run.script
)
def test_a_source_tree_is_refused(run, text, elsewhere, tmp_path):
    """Without `--toy` no script begins to measure an lmcore that is found by PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(elsewhere), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{run.script}.py", *arguments(run, text, tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: this lmcore is not an installed one")


@pytest.mark.full
def test_large_tensors_are_saved_in_pieces(importable, monkeypatch, capsys):
    """The benchmark of checkpoints saves and loads tensors that lmcore cuts, as large ones are."""
    import checkpoint

    from lmcore.checkpoint import write_plan as share

    monkeypatch.setattr(share, "_LARGEST_BYTES", 1 << 20)
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", "--toy"])
    checkpoint.main()
    assert "verify: lmcore" in capsys.readouterr().out


@functools.cache
def commands() -> dict[str, ast.Module]:
    """Return the scripts that are run as a command."""
    trees = {path.name: ast.parse(path.read_text("utf-8")) for path in BENCHMARKS.glob("*.py")}
    return {name: tree for name, tree in trees.items() if is_command(tree)}


def is_command(tree: ast.Module) -> bool:
    """Return whether a module does something when it is run."""
    tests = (ast.unparse(one.test) for one in tree.body if isinstance(one, ast.If))
    return "__name__ == '__main__'" in tests


def called(tree: ast.Module) -> set[str]:
    """Return the names of all functions that a module calls."""
    calls = (one.func for one in ast.walk(tree) if isinstance(one, ast.Call))
    return {one.id for one in calls if isinstance(one, ast.Name)}


def imported(tree: ast.Module, module: str) -> set[str]:
    """Return the names that a module imports from another."""
    imports = (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom))
    return {name.name for one in imports if one.module == module for name in one.names}


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_script_checks(name):
    """Every command parses its flags and checks lmcore by `installed.py`, or its suite does."""
    tree = commands()[name]
    if name in EXEMPT:
        assert "check" not in imported(tree, "installed"), f"{name} is no exception any more"
        return
    if "main" in imported(tree, "device_suite"):
        tree = commands()["device_suite.py"]
    assert {"check", "parse"} <= imported(tree, "installed") & called(tree)
    assert "parse_args" not in ast.unparse(tree), f"{name} parses without `installed.parse`"


def test_every_command_is_tried():
    """Each script that is run as a command is in the tables above, or is an exception."""
    assert {f"{run.script}.py" for run in RUNS} | EXEMPT.keys() == commands().keys()
