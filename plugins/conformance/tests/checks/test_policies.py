"""Wrong stagers and policies are caught, each with the words that name its fault."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_wrong_stagers(run: Any) -> None:
    """Bits of float64, the end of a large tensor, and memory are lost; the host copy is right."""
    result = run("stagers", "device.stagers")["device.stagers"]
    assert result.status == "failed", result
    expected = {
        "narrow": "`float64` has other numbers: of 143 in torch.float64, the first is number ",
        "in-pieces": "`16,777,221 bytes` has other numbers: of 16,777,221 in torch.uint8, the first"
        " is number 1,048,576",
        "once": "`finish` after `end_reads`, `finish` raised IndexError: pop from empty list",
        "hoard": "10 of its last 10 copies are still in memory",
    }
    for name, words in expected.items():
        own = [line for line in result.findings if line.startswith(f"`{name}`: ")]
        assert own[0].startswith(f"`{name}`: {words}"), result.findings
    assert {line.split("`")[1] for line in result.findings} == expected.keys()


@pytest.mark.skipif(importlib.util.find_spec("lmcore_sim") is None, reason="needs lmcore-sim")
def test_a_stager_that_does_not_wait(run: Any) -> None:
    """The copy is read at once, while the device still computes what is copied."""
    result = run("sim-stagers", "device.stagers")["device.stagers"]
    words = "`hasty`: it returns before its copy is there: it does not wait for the device"
    assert result.findings == (f"index 0: {words}", f"index 1: {words}")


def test_wrong_recompute_policies(run: Any) -> None:
    """States, precision, bits, gradients of weights, or what surrounds a block are lost."""
    results = run("recompute", "train.recompute", "train.recompute-own")
    core, own = results["train.recompute"], results["train.recompute-own"]
    kept = "the activations of the others are kept"
    assert core.findings == (
        f"`full`: two blocks of 32,771 x 64 numbers: backward computes 0 of 2 again: {kept}",
        f"`full`: 10 small blocks: backward computes 0 of 10 again: {kept}",
    )
    assert own.status == "failed", own
    expected = {
        "ring": "10 small blocks with dropout, fp32: gradients differ",
        "without-autocast": "has other gradients under autocast to bfloat16 than without it",
        "compressed": "two blocks of 32,771 x 64 numbers with dropout, fp32: gradients differ",
        "input-alone": "10 small blocks whose first input needs no gradient, fp32: gradients of",
        "keeps-outputs": "keeps tensors of every call: 20 calls leave ",
        "first-alone": "a function that returns a tuple of 2 comes back as `Tensor`: the result",
        "if-drawn": "10 small blocks without dropout, fp32: 10 of 10 calls in backward are outside",
    }
    for name, words in expected.items():
        lines = [line for line in own.findings if line.startswith(f"`{name}`: ")]
        assert any(words in line for line in lines), (name, own.findings)


@pytest.mark.parametrize(
    "mode, words",
    [
        ("rounds-again", " differ: norms, model.blocks."),
        ("lazy-rounds-again", ""),
        ("lazy-forgets-draws", " differ by more than rounding: losses, norms, model.blocks."),
    ],
)
def test_runs_of_a_lazy_device_may_round_otherwise(run: Any, mode: str, words: str) -> None:
    """A compiler fuses what is repeated otherwise; other draws are found all the same."""
    result = run(mode, "train.recompute")["train.recompute"]
    assert words in str(result.findings)
    assert (result.status == "failed") == bool(words), result.findings


def test_wrong_precisions(run: Any) -> None:
    """One is in force for its first uses alone, one rounds weights and gradients."""
    found = run("rounds", "train.precision-in-force")["train.precision-in-force"].findings
    assert "`fp32`: `prepare` changes the numbers of `0.weight`, which are to stay bit" in str(
        found
    )
    assert "`fp32`: gradients of `weight` of a `LayerNorm` have the bits of a half" in str(found)
    assert "`bf16`: after 500 uses of its `context()`: precision `bf16` is not" in str(found)


@pytest.mark.parametrize(
    "mode, message",
    [
        (
            "rounds-own",
            "`bf16`: gradients of 28 weights of a GPT, such as ",
        ),
        (
            "narrow-copies",
            "`bf16`: a prepared `Linear` computes with old weights under `no_grad` after they ",
        ),
        pytest.param(
            "fp16-unscaled",
            "`fp16`: gradients of 1e-09 become 0 in float16, and it does not claim",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_precision_that_loses_gradients(run: Any, mode: str, message: str) -> None:
    """Rounded in the core's modules alone, which are no modules of torch; lost below float16."""
    found = run(mode, "train.precision-in-force")["train.precision-in-force"].findings
    assert len(found) == 1, found
    assert found[0].startswith(message), found


def test_a_precision_that_rounds_weights_in_forward(run: Any) -> None:
    """The weights after `prepare` are right, and those after a pass have the bits of bfloat16."""
    found = run("rounds-in-forward", "train.precision-in-force")["train.precision-in-force"]
    passes = "`bf16`: a forward and a backward pass change the numbers of "
    own = [line for line in found.findings if line.startswith(passes)]
    assert len(own) == len(found.findings) == 2, found
    assert own[0] == f"{passes}`0.weight`, which are to stay bit for bit"
    assert own[1].startswith(f"{passes}8 weights of a GPT, such as `")


def test_a_boundary_that_rounds(run: Any) -> None:
    """The finding names the weight, which is close to the host's after a few steps."""
    found = run("boundary-rounds", "device.step-boundary")["device.step-boundary"].findings
    assert "`step_boundary` changes numbers: a weight has others after it" in found


def test_a_cache_of_programs_without_constants(run: Any) -> None:
    """Each constant that changes is named; the losses of one model are right."""
    found = run("caches-programs", "extras.compile")["extras.compile"].findings
    constants = ("epsilon of a norm", "factor", "size of a view")
    assert found == tuple(
        f"a function with another {constant} gets the program of one that was compiled before it: "
        "`compile_backend` keeps programs without their constants"
        for constant in constants
    )


def test_a_stream_that_begins_anew(run: Any) -> None:
    """A tracker that repeats a stream's numbers drops the same elements in every layer."""
    found = run("repeats-streams", "device.rng-streams")["device.rng-streams"].findings
    assert found == ("a stream draws the same numbers at each entry: it begins anew",)


def test_a_step_boundary_that_draws_and_keeps(run: Any) -> None:
    """Both faults are named."""
    found = run("keeps-and-draws", "device.step-boundary")["device.step-boundary"].findings
    assert "`step_boundary` draws random numbers: it moves the host's generator" in found
    assert "`step_boundary` keeps memory: 100 calls leave 25" in str(found)
