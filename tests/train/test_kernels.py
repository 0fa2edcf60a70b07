"""The kernels of a run: `--strict-ops` over all that a run binds, and what its record keeps."""

from __future__ import annotations

import json
from typing import Any


def test_a_run_without_references(train: Any) -> None:
    """In float32 the CPU has a kernel for every op of a GPT and of its step."""
    run = train("run", "--train-iters 2 --strict-ops --deterministic")
    assert run.status == 0, run.err
    kept = json.loads((run.directory / "kernels.json").read_text())
    assert kept["strict"] is True
    assert kept["traits"] == ["deterministic"]
    assert len(kept["fingerprint"]) == 64
    assert {one["plugin"] for one in kept["ops"]} == {"cpu"}
    assert {"bias_dropout_add", "adamw", "grad_norm"} <= {one["op"] for one in kept["ops"]}


def test_strict_names_the_ops_of_model_and_step_at_once(train: Any) -> None:
    """One message has every op that would be a reference, with the reasons; nothing is trained."""
    flags = "--train-iters 2 --strict-ops --ops attention=reference grad_norm=reference"
    run = train("run", flags)
    assert run.status == 2
    assert "`--strict-ops`: ops `attention`, `grad_norm` have no kernel for this case" in run.err
    assert run.err.count("`reference` is preferred by --ops") == 3
    assert "Traceback" not in run.err
    assert not (run.directory / "metrics.jsonl").exists()


def test_the_fingerprint_is_that_of_the_kernels(train: Any) -> None:
    """Two runs with the same kernels have the same one, another kernel changes it."""

    def fingerprint(name: str, flags: str) -> str:
        run = train(name, f"--train-iters 1 {flags}")
        assert run.status == 0, run.err
        return str(json.loads((run.directory / "kernels.json").read_text())["fingerprint"])

    base = fingerprint("one", "--seed 1")
    assert fingerprint("two", "--seed 2 --ops attention=blocked") == base
    assert fingerprint("three", "--ops attention=reference") != base
