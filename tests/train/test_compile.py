"""`--compile` computes what the eager run computes, or says what it lacks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")


LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"


@pytest.fixture
def eager_and_compiled(start: Any, train: Any, tmp_path: Any) -> Callable[[str], tuple[Any, Any]]:
    """Runs the same flags without and with `--compile`."""

    def run(flags: str) -> tuple[Any, Any]:
        eager = train("eager", flags)
        assert eager.status == 0, eager.err
        process = start("compiled", f"{flags} --compile")
        _, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        compiled = type(eager)(0, "", err, tmp_path / "compiled")
        assert len(compiled.rows) == len(eager.rows)
        return eager, compiled

    return run


@pytest.mark.full  # two more runs that compile
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
@pytest.mark.parametrize("more", ["", LLAMA], ids=["gpt", "llama"])
def test_equals_eager_in_bf16(eager_and_compiled: Any, more: str) -> None:
    """The losses of a compiled run are the eager run's within the rounding of bf16."""
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 128"
    eager, compiled = eager_and_compiled(
        f"--train-iters 6 {sizes} --lr 1e-3 --precision bf16 {more}"
    )
    assert len(compiled.rows) == 6
    for one, other in zip(eager.rows, compiled.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_equals_eager(eager_and_compiled: Any) -> None:
    """The losses of a compiled run are the eager run's to 1e-5, and so are its weights."""
    eager, compiled = eager_and_compiled("--train-iters 4 --num-layers 1 --lr 1e-3")
    assert len(compiled.rows) == 4
    for one, other in zip(eager.rows, compiled.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert [("compiles" in row, "tokens_per_second" in row) for row in compiled.rows] == [
        (True, False),
        *[(False, True)] * 3,
    ]
    assert compiled.summary["compiling_steps"] == 1
    assert "compile   the first step took" in compiled.err
    weights = compiled.saved()
    for name, tensor in eager.saved().items():
        if name.startswith("model."):
            assert float((weights[name] - tensor).abs().max()) < 1e-5, name


@pytest.mark.full  # two more runs that compile; `test_records.py` has it without compiling
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_recompute(start: Any, finish: Any, assert_same: Any) -> None:
    """Compiled layers that are computed again, dropout included, give the same bits."""
    flags = "--train-iters 3 --compile --hidden-dropout 0.1 --attention-dropout 0.1"
    runs = []
    for name, more in (("plain", ""), ("full", "--recompute full")):
        run = finish(start(name, f"{flags} {more}"), name)
        assert run.status == 0, run.err
        runs.append(run)
    plain, full = runs
    assert full.curve() == plain.curve()
    assert_same(full.saved(), plain.saved())


def test_without_a_compiler(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the message says so before anything is built, and names the fixes."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    run = train("run", "--train-iters 2 --compile")
    assert run.status == 2
    assert "error: `--compile` needs a C++ compiler on the CPU, and none was found" in run.err
    assert "hint: install g++" in run.err
    assert not run.directory.exists()
