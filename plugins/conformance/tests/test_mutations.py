"""Level 2 catches every kernel that is wrong in one thing, and no kernel that is right."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.base.errors import ConfigError
from lmcore_conformance.op.run_shapes import RunShapes, read_shapes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


MESSAGES = {
    ("adamw", "large.512-weights"): ("weights 512 of 700 has ",),
    ("adamw", "large.tail"): (
        "one of the weights of elements 16,776,432 to 16,777,462 of 16,778,494 has ",
    ),
    ("attention", "dropout.begins-again"): ("in a call of 27 samples of 19 heads, 4,",),
    ("attention", "dropout.other-mask"): ("gradients pass elsewhere than values did: that of `q`",),
    ("attention", "widths.positions"): ("65,541 keys",),
    ("bias_dropout_add", "independent.begins-again"): (
        "in a call of 2,097,153 elements, 16,384 of 32,768 blocks of 64 drop what another block",
    ),
    ("bias_dropout_add", "widths"): ("width 32,768",),
    ("bias_gelu", "history"): ("regular, float32: in another thread, the output ",),
    ("bias_gelu", "widths"): ("width 32,768",),
    ("cross_entropy", "widths"): ("vocabulary of 131,072",),
    ("cross_entropy", "elements"): (
        "16,781,072 elements of equal blocks, float32: the gradient of argument 1 in block 9,325",
    ),
    ("cross_entropy", "elements.rest"): (
        "the gradient of argument 1 in block 1 of 9,328 is not 0",
    ),
    ("grad_norm", "edges.zeros"): ("of zeros it is nan",),
    ("grad_norm", "large.tail"): ("16,778,494 elements, the last alone not 0: off by 1.0e+00",),
    ("grad_norm", "value.in-place"): ("float32, 6 tensors: it changes 4 of them, first 0",),
    ("layer_norm", "history"): (
        "regular, float32: it keeps tensors of every call: 20 calls leave 20 more",
    ),
    ("layer_norm", "repeatable"): ("65,537 rows, float32: a second call gives other bits",),
    ("layer_norm", "widths.8192"): ("width 16,384",),
    ("linear", "history"): ("inside the autocast of `bf16`, under `no_grad`: after a call with",),
    ("linear", "widths"): ("width 32,768",),
    ("linear_cross_entropy", "widths"): ("vocabulary of 131,072",),
    ("rms_norm", "widths"): ("width 16,384",),
    ("rotary_embedding", "no-grad"): (
        "one token of each sample, float32, under `no_grad`: it changes its argument `x_BNSD`",
    ),
    ("rotary_embedding", "widths"): ("65,541 positions",),
    ("scaled_masked_softmax", "pure"): ("it draws random numbers, and the reference draws none",),
    ("scaled_masked_softmax", "widths"): ("65,541 keys",),
    ("scaled_masked_softmax", "elements"): ("elements of equal blocks, float32: the output in b",),
    ("swiglu", "widths"): ("width 32,768",),
}
"""Parts of the finding about a kernel, which show that its fault was found and no other."""


@pytest.fixture
def kernels(fake: Any) -> Any:
    """The tables of the fake's kernels."""
    sys.path.insert(0, str(Path(__file__).parent / "fake"))
    try:
        from lmcore_fake import kernels
    finally:
        del sys.path[0]
    return kernels


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """The settings of a run whose shapes no other check has."""
    lines = [
        "model: {hidden_size: 96, num_attention_heads: 12, seq_length: 512,",
        "  group_query_attention: true, num_query_groups: 3}",
        "training: {micro_batch_size: 2}",
        "accelerator: {precision: fp32}",
    ]
    (tmp_path / "config.yaml").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def caught(results: Any) -> dict[str, set[str]]:
    """Return by check the ids of kernels that it has a finding about."""
    found = defaultdict(set)
    for name, result in results.items():
        for line in result.findings:
            found[name].add(line.split("`")[1])
    return found


def test_every_mutation_is_caught(kernels: Any, run: Any) -> None:
    """A wrong constant fails the values, a dropped or changed gradient the gradients, nothing else.

    The kernels are for float32 only, as many a device's are.
    """
    names = ("ops.adamw.update", "ops.adamw.settings", "ops.grad_norm.value")
    ops = {op for op, _ in kernels.MUTANTS} - {"adamw", "grad_norm"}
    sides = [f"ops.{op}.{side}" for op in sorted(ops) for side in ("forward", "backward")]
    found = caught(run("mutants", *sides, *names))
    missed = []
    for op, name in kernels.MUTANTS:
        if op in {"adamw", "grad_norm"}:
            if not any(name in found[check] for check in names if f".{op}." in check):
                missed.append((op, name))
            continue
        side = "forward" if name.startswith("value-") else "backward"
        if name not in found[f"ops.{op}.{side}"]:
            missed.append((op, name))
        if side == "backward":
            assert name not in found[f"ops.{op}.forward"], (op, name)
    assert not missed
    assert {op for op, _ in kernels.MUTANTS} == {
        *("adamw", "attention", "bias_dropout_add", "bias_gelu", "cross_entropy", "grad_norm"),
        *("layer_norm", "linear", "linear_cross_entropy", "rms_norm", "rotary_embedding"),
        *("scaled_masked_softmax", "swiglu"),
    }
    assert len(kernels.MUTANTS) > 80
    for result in found.values():
        assert "reference" not in result


def test_every_other_fault_of_a_kernel_is_caught(kernels: Any, run: Any, settings: Path) -> None:
    """Strides ignored, nothing refused, NaN hidden, and so on: each by the check of that name."""
    shapes = read_shapes(str(settings))
    checks = {(op, name): f"ops.{op}.{name.partition('.')[0]}" for op, name in kernels.MISFITS}
    results = run("misfits", *checks.values(), shapes=shapes)
    found = caught(results)
    for (op, name), check in checks.items():
        assert name in found[check], (op, name, results[check])
        assert "reference" not in found[check], results[check]
        for message in MESSAGES.get((op, name), ()):
            line = next(one for one in results[check].findings if one.startswith(f"`{name}`"))
            assert message in line, line


def test_a_claim_is_held_to_what_its_run_asks_for(run: Any) -> None:
    """A kernel may repeat its bits only under `--deterministic`, which torch and device know of."""
    result = run("when-asked", "ops.rms_norm.repeatable")["ops.rms_norm.repeatable"]
    assert (result.status, result.findings) == ("passed", ())
    assert "when-asked: " in result.detail


def test_a_kernel_that_crashes_or_hangs_loses_only_its_check(run: Any) -> None:
    """The check says how its process ended and where; those after it are made."""
    for mode, patience, message in (
        ("crash-op", 1.0, "it was in `crash_op` (lmcore_fake/kernels.py, line "),
        (
            "hang-op",
            0.15,
            "no answer in time; stopped; it was in `hang_op` (lmcore_fake/kernels.py",
        ),
    ):
        names = ("ops.bias_gelu.dtypes", "ops.swiglu.forward", "ops.cross_entropy.dtypes")
        results = run(mode, *names, patience=patience)
        first, broken, last = (results[name] for name in names)
        assert (first.status, last.status) == ("passed", "passed"), results
        assert broken.status == "failed"
        assert message in broken.detail


def test_shapes_of_a_configuration(settings: Path, tmp_path: Path) -> None:
    """A run directory and a preset have shapes; what is neither is an error with a hint."""
    found = read_shapes(str(settings))
    assert (found.heads, found.groups, found.head_dim, found.length) == (12, 3, 8, 512)
    assert (found.micro_batch, found.precision, found.ffn) == (2, "fp32", 384)
    assert RunShapes.from_dict(found.to_dict()) == found
    llama = read_shapes("llama-1b")
    assert llama.words == (
        "llama-1b: 8 x 4,096 tokens, hidden size 2,048, 32 heads of 64 in 4 groups, "
        "feed-forward 5,632"
    )
    assert {"rms_norm", "swiglu", "rotary_embedding"} < set(llama.ops)
    with pytest.raises(ConfigError, match="neither a preset nor a run directory"):
        read_shapes("llama-2b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="in this directory"):
        read_shapes(str(tmp_path / "empty"))
