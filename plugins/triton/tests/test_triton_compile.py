"""Output of Triton's and torch's compilers for the kernels; needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="`tox -e triton` installs Triton")

WORKER = Path(__file__).with_name("compile_worker.py")
KERNELS = {
    *("norm_forward", "norm_backward", "bias_gelu_forward", "bias_gelu_backward"),
    *("swiglu_forward", "swiglu_backward", "softmax_forward", "softmax_backward", "rotate"),
    *("bias_dropout_add_forward", "bias_dropout_add_backward"),
    *("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_in_place"),
}


@cache
def worker(capability: int) -> dict:
    """Return what the worker prints; it is not to interpret."""
    variants = ["compiled", "widest", "traced"] if capability == 90 else ["compiled"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, WORKER, str(capability), *variants]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


on_hopper = pytest.mark.xdist_group("hopper")  # one process, which starts the worker once


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=on_hopper)])
def test_every_kernel_compiles(capability):
    """For Ampere and Hopper each kernel becomes a binary, from what a model would launch."""
    found = worker(capability)["compiled"]
    assert found.keys() == KERNELS
    for name, kernel in found.items():
        assert kernel["binary"] > 1000, name
        assert kernel["target"].startswith(f"sm_{capability}"), name


@on_hopper
def test_no_kernel_adds_in_an_order_of_chance():
    """Kernels that claim to be deterministic have no atomic additions."""
    found = worker(90)["compiled"]
    assert {name for name, kernel in found.items() if kernel["atomics"]} == set()


@on_hopper
def test_registers_hold_what_they_should():
    """No kernel puts values into a thread's memory, even with the longest rows that it takes.

    Kernels of the longest scores do, in the backward pass; a copy would cost more.
    """
    found = worker(90)
    stack = {name: kernel["stack"] for name, kernel in found["compiled"].items() if kernel["stack"]}
    stack |= {name: kernel["stack"] for name, kernel in found["widest"].items() if kernel["stack"]}
    assert stack.pop("softmax_backward", 0) <= 64
    assert stack == {}


@on_hopper
def test_memory_is_read_in_the_widest_pieces():
    """A thread moves 16 bytes at a time where rows are whole numbers of those."""
    narrow = {name: kernel["widest"] for name, kernel in worker(90)["compiled"].items()}
    assert narrow == dict.fromkeys(narrow, 4)


@on_hopper
def test_rows_are_found_beyond_two_to_the_31():
    """Places in memory are products in 64 bits: logits of 50304 by 65536 do not wrap around."""
    found = worker(90)["compiled"]
    assert {name for name, kernel in found.items() if not kernel["wide_rows"]} == set()


@on_hopper
def test_compiled_blocks_are_not_broken():
    """Each op is one graph forward and one backward, whose kernels write what is new.

    If the compiler assumed that a kernel writes its inputs, it would copy them first.
    """
    found = worker(90)["traced"]
    outputs = {"out", "mean", "scale", "loss", "log_sum", "grad_x", "grad_logits"}
    outputs |= {"weight_parts", "bias_parts"}
    for name, graphs in found.items():
        assert len(graphs) == 2, name
        steps = [step for graph in graphs for step in graph]
        if name == "linear_cross_entropy":
            assert "lmcore_triton.linear_cross_entropy.default" in steps
            continue
        kernels = [step for step in steps if step.startswith("kernel writes ")]
        assert len(kernels) == 2, (name, steps)
        written = {word for step in kernels for word in step.split()[2:]}
        assert written
        assert written <= outputs, name
        assert not [step for step in steps if "clone" in step or "lmcore_triton" in step], name
