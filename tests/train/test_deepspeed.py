"""Runs with `--engine deepspeed`: equal to a native process, continued by either, refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite import warm

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),  # up to four runs of several processes each
    pytest.mark.skipif(
        None in map(importlib.util.find_spec, ("deepspeed", "lmcore_deepspeed")),
        reason="DeepSpeed or lmcore-deepspeed is not installed: `tox -e deepspeed` installs it",
    ),
]

CLOSE = 5e-7
"""Relative, losses and gradient norms in float32: three times what was measured."""
CLOSE_HALF = {"bf16": (1e-4, 5e-3), "fp16": (2e-5, 1e-3)}
"""The same of losses and of norms, where DeepSpeed rounds weights too and not only products: four
times what was measured."""

CLOSE_MOMENT = 1e-6
"""Of every parameter's first moment, the mean of all steps' gradients, in parts of its largest
number: three times what was measured."""

STEPS = "--train-iters 5 --lr 1e-2 --global-batch-size 16"
# Nothing is small enough to stay whole on every process.
SHARD_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    """Has torch's compiler imported ahead: DeepSpeed imports it to decorate its functions."""
    warm.preload("torch._inductor.compile_fx")


@pytest.fixture
def run(start: Any, finish: Any) -> Callable[..., Any]:
    """Trains in *size* processes and returns the run.

    Runs without DeepSpeed are made in the test's own process, by `train` and `train_once`.
    """

    def go(name: str, flags: str, size: int = 2) -> Any:
        return finish(start(name, f"--nproc-per-node {size} {flags}"), name)

    return go


@pytest.fixture
def file(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """Writes a file of DeepSpeed's and returns the flag that names it."""

    def write(content: dict[str, Any]) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(content))
        return f"--deepspeed-config {path}"

    return write


def completed(run: Any) -> Any:
    assert run.status == 0, run.err
    return run


def farthest(run: Any, other: Any, name: str) -> float:
    """Return the largest relative difference of a figure over the steps that both have."""
    rows = {row["step"]: row for row in other.rows}
    pairs = [(row[name], rows[row["step"]][name]) for row in run.rows if name in row]
    assert pairs
    return max(abs(a / b - 1) for a, b in pairs)


def farthest_gradient(run: Any, other: Any) -> float:
    """Return the largest difference of Adam's first moments, in parts of each one's largest."""
    found, wanted = run.saved(), other.saved()
    names = [name for name in wanted if name.startswith("optimizer.exp_avg.")]
    assert len(names) > 12
    apart = max(
        float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in names
    )
    print("first moments", apart)
    return apart


def assert_equal_runs(run: Any, other: Any, close: float = CLOSE) -> None:
    assert farthest(run, other, "loss") < close
    assert farthest(run, other, "grad_norm") < close
    rates = {row["step"]: row["learning_rate"] for row in other.rows}
    assert all(row["learning_rate"] == rates[row["step"]] for row in run.rows)


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 1",
        pytest.param("--zero-stage 2 --recompute full", marks=pytest.mark.full),
        pytest.param("--zero-stage 2 --recompute selective --cpu-offload", marks=pytest.mark.full),
        pytest.param("--zero-stage 3 --recompute full", marks=pytest.mark.full),
        "--zero-stage 3 --cpu-offload",
    ],
)
def test_it_equals_one_native_process(train_once: Any, run: Any, file: Any, flags: str) -> None:
    """Losses, norms, rates and the validation of 5 steps, two micro-batches each, agree."""
    same = f"{STEPS} --eval-iters 1 --eval-interval 5 --split 8,6,1"
    native = train_once(same)
    sharded = completed(run("sharded", f"{same} --engine deepspeed {flags} {file(SHARD_ALL)}"))
    assert_equal_runs(sharded, native)
    assert farthest(sharded, native, "valid_loss") < CLOSE
    assert farthest_gradient(sharded, native) < CLOSE_MOMENT


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 3))]
)
def test_masked_targets(train_once: Any, run: Any, file: Any, stage: int) -> None:
    """The loss is the mean over the valid targets of the global batch, as of a native process."""
    same = f"{STEPS} --eod-mask-loss --eval-iters 1 --eval-interval 5 --split 8,6,1"
    native = train_once(f"{same} --micro-batch-size 16")
    flags = f"--micro-batch-size 2 --engine deepspeed --zero-stage {stage} {file(SHARD_ALL)}"
    sharded = completed(run("sharded", f"{same} {flags}"))
    assert_equal_runs(sharded, native)
    assert farthest(sharded, native, "valid_loss") < CLOSE
    assert farthest_gradient(sharded, native) < 5 * CLOSE_MOMENT  # sums of 8 parts and of 1


@pytest.mark.full
def test_a_llama(train_once: Any, run: Any, file: Any) -> None:
    """Rotary positions, grouped keys and an untied head are sharded like other parameters."""
    same = (
        f"{STEPS} --normalization RMSNorm --swiglu --ffn-hidden-size 24 "
        "--position-embedding-type rope "
        "--group-query-attention --num-query-groups 2 --no-add-bias-linear "
        "--untie-embeddings-and-output-weights"
    )
    native = train_once(same)
    flags = f"--engine deepspeed --zero-stage 3 {file(SHARD_ALL)}"
    sharded = completed(run("sharded", f"{same} {flags}"))
    assert_equal_runs(sharded, native)
    assert farthest_gradient(sharded, native) < CLOSE_MOMENT


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_a_bloom(train_once: Any, run: Any, file: Any, stage: int) -> None:
    """ALiBi and the norm of the embeddings compute as in a native process."""
    same = f"{STEPS} --position-embedding-type alibi --embed-layernorm"
    native = train_once(same)
    sharded = completed(
        run("sharded", f"{same} --engine deepspeed --zero-stage {stage} {file(SHARD_ALL)}")
    )
    assert_equal_runs(sharded, native)
    assert farthest_gradient(sharded, native) < CLOSE_MOMENT


@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(stage, marks=pytest.mark.full) for stage in (2, 3))]
)
def test_a_layer_called_twice(train_once: Any, as_ranks: Any, file: Any, stage: int) -> None:
    """A layer that is called twice in a forward pass gets both gradients, whatever the stage."""
    script = [str(Path(__file__).with_name("layers_twice.py"))]

    def twice(name: str, size: int, flags: str) -> Any:
        return completed(as_ranks(name, f"{STEPS} {flags}", [script] * size))

    native = twice("native", 1, "")
    assert farthest(native, train_once(STEPS), "grad_norm") > 1e-2
    sharded = twice("sharded", 2, f"--engine deepspeed --zero-stage {stage} {file(SHARD_ALL)}")
    assert_equal_runs(sharded, native)
    assert farthest_gradient(sharded, native) < CLOSE_MOMENT


def test_a_single_process_needs_no_launcher(train_once: Any, run: Any, file: Any) -> None:
    """One process, without accumulation, is a group by itself."""
    same = "--train-iters 3 --sample-tokens 4"
    native = train_once(same)
    alone = completed(
        run("alone", f"{same} --engine deepspeed --zero-stage 3 {file(SHARD_ALL)}", 1)
    )
    assert_equal_runs(alone, native)
    assert alone.summary["sample"] == native.summary["sample"]


def test_the_sample_of_sharded_weights(train_once: Any, run: Any, file: Any) -> None:
    """Weights that stage 3 has sharded give the text that whole ones give."""
    same = "--train-iters 2 --global-batch-size 8 --sample-tokens 6"
    native = train_once(same)
    sharded = completed(
        run("sharded", f"{same} --engine deepspeed --zero-stage 3 {file(SHARD_ALL)}")
    )
    assert sharded.summary["sample"] == native.summary["sample"]


@pytest.mark.parametrize(
    "precision,stage",
    [
        ("bf16", 1),
        pytest.param("bf16", 2, marks=pytest.mark.full),
        pytest.param("bf16", 3, marks=pytest.mark.full),
        pytest.param("fp16", 1, marks=pytest.mark.full),
        ("fp16", 3),
    ],
)
def test_half_precision_is_close(
    train_once: Any, run: Any, file: Any, precision: str, stage: int
) -> None:
    """DeepSpeed keeps half weights beside its float32 rows; the results stay near."""
    same = (
        "--train-iters 5 --lr 1e-3 --global-batch-size 16"
        f" --precision {precision} --initial-loss-scale 65536"
    )
    native = train_once(same)
    flags = f"--engine deepspeed --zero-stage {stage} {file(SHARD_ALL)}"
    sharded = completed(run("sharded", f"{same} {flags}"))
    loss, norm = CLOSE_HALF[precision]
    assert farthest(sharded, native, "loss") < loss
    assert farthest(sharded, native, "grad_norm") < norm
    assert not [row for row in sharded.rows if row["skipped_iterations"]]


def test_the_loss_scale_is_the_runs_own(run: Any) -> None:
    """From 2^32 on steps are skipped: rate and updates wait, samples count, the scale halves."""
    skipping = run("run", f"{STEPS} --precision fp16 --engine deepspeed --zero-stage 2")
    assert skipping.status == 0, skipping.err
    assert "warning: no step updated the weights" in skipping.err
    assert [row["loss_scale"] for row in skipping.rows] == [2.0**n for n in (32, 31, 30, 29, 28)]
    assert [row["skipped_iterations"] for row in skipping.rows] == [1, 2, 3, 4, 5]
    assert skipping.summary["consumed_samples"] == 80
    assert len({row["learning_rate"] for row in skipping.rows}) == 1
    state = skipping.saved()
    assert float(state["optimizer.step.token_embedding.weight"]) == 0.0


def test_a_run_goes_on_with_the_other_engine(train_once: Any, run: Any, file: Any) -> None:
    """Native, then three DeepSpeed processes whose shards do not come out even, then native."""
    plain = "--lr 1e-2 --lr-decay-iters 6 --global-batch-size 12 --train-iters"
    whole = train_once(f"{plain} 6")
    first = train_once(f"{plain} 2")
    flags = f"--engine deepspeed --zero-stage 3 {file(SHARD_ALL)} --load {first.directory}"
    second = completed(run("second", f"{plain} 4 {flags}", 3))
    third = train_once(f"{plain} 6 --load {second.directory}")
    for part in (second, third):
        assert_equal_runs(part, whole)
    state = second.saved()
    assert {name for name in state if not name.startswith("rng")} == {
        name for name in whole.saved() if not name.startswith("rng")
    }
    assert float(state["optimizer.step.final_norm.bias"]) == 4.0


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_a_run_goes_on_bit_for_bit(run: Any, file: Any, assert_same: Any, precision: str) -> None:
    """Two parts of a run leave what the whole leaves, its float32 weights too."""
    plain = f"--precision {precision} --lr 1e-2 --lr-decay-iters 4 --global-batch-size 16"
    flags = f"{plain} --engine deepspeed --zero-stage 2 {file(SHARD_ALL)}"
    whole = completed(run("whole", f"{flags} --train-iters 4"))
    first = completed(run("first", f"{flags} --train-iters 2"))
    rest = completed(run("rest", f"{flags} --train-iters 4 --load {first.directory}"))
    assert rest.curve() == whole.curve()[2:]
    assert_same(whole.saved(), rest.saved())


def test_no_load_optim_is_obeyed(train_once: Any, run: Any, file: Any) -> None:
    """The optimizer begins again, weights and counters do not: as in a native process."""
    plain = "--lr 1e-2 --lr-decay-iters 4 --global-batch-size 8 --train-iters"
    first = train_once(f"{plain} 2")
    again = f"{plain} 4 --no-load-optim --load {first.directory}"
    native = train_once(again)
    sharded = completed(run("sharded", f"{again} --engine deepspeed {file(SHARD_ALL)}"))
    assert_equal_runs(sharded, native)
    assert float(sharded.saved()["optimizer.step.final_norm.bias"]) == 2.0
    with_state = train_once(f"{plain} 4 --load {first.directory}")
    assert farthest(sharded, with_state, "loss") > 1e-4


@pytest.mark.parametrize("offload", ["", pytest.param("--cpu-offload", marks=pytest.mark.full)])
def test_the_batch_grows(train_once: Any, run: Any, offload: str) -> None:
    """One, then two, then four micro-batches a step, as `--rampup-batch-size` says."""
    ramp = "--rampup-batch-size 8 8 48 --global-batch-size 32 --train-samples 160 --lr 1e-2"
    native = train_once(ramp)
    flags = f"{ramp} --engine deepspeed --zero-stage 2 {offload}"
    sharded = completed(run("sharded", flags))
    sizes = [row["global_batch_size"] for row in sharded.rows]
    assert sizes == [row["global_batch_size"] for row in native.rows]
    assert sizes[0] == 8
    assert sizes[-1] == 32
    assert_equal_runs(sharded, native)


def test_the_familys_own_file_and_flags(run: Any, file: Any) -> None:
    """A published script's flags and file run as they are; what the file says is in the plan."""
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 12,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    named = file(content).replace("--deepspeed-config", "--deepspeed_config")
    flags = (
        "--micro-batch-size 1 --rampup-batch-size 2 2 10 --global-batch-size 4 --train-samples 20"
        " --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 1e-4"
        " --lr-warmup-samples 5 --clip-grad 1.0 --weight-decay 1e-1 --fp16"
        f" --checkpoint-activations --deepspeed {named} --zero-stage 1"
        " --deepspeed-activation-checkpointing"
    )
    done = completed(run("run", flags))
    assert done.rows[-1]["loss_scale"] == 4096.0
    assert not done.summary["skipped_iterations"]
    assert "loss_scale_window: 500" in (done.directory / "config.yaml").read_text()


SLOW = """
import os, sys, time
def patch():
    if "torch" not in sys.modules:  # not loaded in this process: it is no rank
        return
    from lmcore.data.loading.loader import BatchLoader
    original = BatchLoader.__next__
    def late(self):
        time.sleep(0.08 if os.environ.get("RANK") == "1" else 0)
        return original(self)
    BatchLoader.__next__ = late
os.register_at_fork(after_in_child=patch)
"""


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_slow_rank_is_named(start: Any, finish: Any, stage: int) -> None:
    """Its own time leaves out the waits in DeepSpeed's collectives, as in native runs."""
    flags = f"--nproc-per-node 2 --engine deepspeed --zero-stage {stage}"
    flags += " --train-iters 10 --log-interval 9"
    run = finish(start("run", flags, before=SLOW), "run")
    assert run.status == 0, run.err
    assert "warning: rank 1 on host " in run.err
    (row,) = [row for row in run.rows if "slowest_rank" in row]
    assert (row["step"], row["slowest_rank"]) == (9, 1)
    assert row["rank_time_min_ms"] < row["rank_time_max_ms"] - 40


def test_gradients_that_are_not_finite_stop_the_run(run: Any) -> None:
    """The first step blows the weights up; the second one says so and updates nothing."""
    flags = "--train-iters 9 --lr 1e30 --global-batch-size 8 --engine deepspeed --zero-stage 2"
    failed = run("run", flags)
    assert failed.status == 1
    assert re.search("error: the (loss|gradient norm) is (nan|inf) at step 2", failed.err)
    assert not list((failed.directory / "checkpoints").glob("iter_*"))


def test_deepspeed_names_what_it_refuses(run: Any, file: Any) -> None:
    """A key that DeepSpeed does not know is reported with its name, once."""
    flag = file({"zero_optimization": {"stage": 2, "overlap_com": True}})
    failed = run("run", f"--train-iters 1 --engine deepspeed {flag}")
    assert failed.status == 2
    assert "error: DeepSpeed refuses its configuration\nwhy: `overlap_com`" in failed.err
    assert "all 2 ranks report the same error" in failed.err


def test_it_is_quiet_and_recorded(run: Any) -> None:
    """DeepSpeed prints nothing itself; its configuration is in the run directory."""
    done = completed(run("run", "--train-iters 2 --engine deepspeed --zero-stage 3"))
    assert "DeepSpeed" not in done.out
    assert re.findall("DeepSpeed.*", done.err) == [
        f"DeepSpeed {importlib.metadata.version('deepspeed')}, ZeRO stage 3"
    ]
    assert "Warning" not in done.err
    record = json.loads((done.directory / "deepspeed.json").read_text())
    assert record["config"]["zero_optimization"] == {"stage": 3}
    assert record["config"]["train_batch_size"] == 8
    environment = json.loads((done.directory / "environment.json").read_text())
    assert environment["comm_backend"] == {"name": "gloo", "plugin": "cpu"}
    assert (
        environment["plugins"][0]["brings"].items()
        >= {"device": "cpu", "comm_backend": "gloo"}.items()
    )


def test_a_native_run_does_not_import_it(arguments: Any) -> None:
    """A run without `--engine deepspeed` does not import DeepSpeed."""
    code = (
        "import sys\nfrom lmcore.cli.main import main\n"
        f"status = main({arguments('run', '--train-iters 1')!r})\n"
        "sys.exit(status or int('deepspeed' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
