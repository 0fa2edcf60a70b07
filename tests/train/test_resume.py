"""Equal runs are equal bit for bit, and a run in two parts is the run in one."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.signals import SAME_SIGNAL_SECONDS
from lmcore.train.step_queue import StepQueue

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
VALID = "--eval-interval 5 --eval-iters 2 --split 80,20,0"


def test_two_equal_runs(train: Any, assert_same: Any) -> None:
    """The same configuration twice: equal losses, norms, weights, moments and random states."""
    flags = f"--train-iters 8 --global-batch-size 8 {DROPOUT} {VALID}"
    first, second = train("a", flags), train("b", flags)
    assert first.status == second.status == 0, first.err
    assert len(first.curve()) == 8
    assert first.curve() == second.curve()
    assert_same(first.saved(), second.saved())
    other = train("c", flags + " --seed 7")
    assert other.curve() != first.curve()


@pytest.mark.parametrize("micro", [4, 1])
def test_resume_is_the_unbroken_run(train: Any, assert_same: Any, micro: int) -> None:
    """Ten steps, then ten more, equal twenty: weights, moments, RNG, data, losses, validations."""
    flags = (
        f"--train-iters 20 --global-batch-size 4 --micro-batch-size {micro} {DROPOUT} {VALID}"
        " --lr-warmup-iters 3"
    )
    whole = train("whole", flags)
    first = train("part", f"{flags} --exit-interval 10")
    assert first.status == 0, first.err
    assert len(first.rows) == 10
    assert first.summary["status"] == "step 10 is a multiple of --exit-interval 10"
    part = train("part", f"{flags} --load {first.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert [row["step"] for row in part.rows if "valid_loss" in row] == [5, 10, 15, 20]
    assert_same(part.saved(), whole.saved())
    assert part.summary["iteration"] == 20


def test_bloom_resumes_bitwise(train: Any, assert_same: Any) -> None:
    """ALiBi, normalized embeddings and a gate: three steps, then three more, equal six."""
    flags = (
        "--position-embedding-type alibi --embed-layernorm --glu-activation geglu "
        f"--train-iters 6 --global-batch-size 4 {DROPOUT}"
    )
    whole = train("whole", flags)
    first = train("part", f"{flags} --exit-interval 3")
    assert len(first.rows) == 3, first.err
    part = train("part", f"{flags} --load {first.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())
    other = train("other", flags.replace("geglu", "reglu") + f" --load {first.directory}")
    assert "glu_activation: checkpoint geglu, model reglu" in other.err


@pytest.mark.parametrize(
    "damage", ["altered", pytest.param("no manifest", marks=pytest.mark.full), "truncated"]
)
def test_damage_of_the_newest_checkpoint(train: Any, assert_same: Any, damage: str) -> None:
    """The older one is taken with a warning, and the run is bitwise the undisturbed one."""
    flags = f"--train-iters 12 --global-batch-size 4 {DROPOUT} --save-interval 4"
    whole = train("whole", flags)
    part = train("part", f"{flags} --exit-interval 8")
    newest = part.directory / "checkpoints/iter_0000008"
    (path,) = newest.glob("*.distcp")
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        data = path.read_bytes()
        middle = len(data) // 2
        altered = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes(altered if damage == "altered" else data[:-1])
    named = train("named", f"{flags} --load {newest}")
    assert named.status == 1, named.err
    part = train("part", f"{flags} --load {part.directory}")
    assert part.status == 0, part.err
    warning = part.err.partition("damaged checkpoints")[2]
    assert "`iter_0000008`: " in warning
    assert "`iter_0000004` is the newest" in warning
    assert [row["step"] for row in part.rows] == list(range(1, 13))
    assert part.curve() == whole.curve()
    for step in (8, 12):
        assert_same(part.saved(step), whole.saved(step))


def test_resume_over_an_epoch(train: Any, assert_same: Any, data_prefix: str) -> None:
    """The data order continues over the end of an epoch, in steps that stop on either side."""
    flags = f"--train-iters 40 --micro-batch-size 16 {DROPOUT}"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    assert whole.rows[-1]["consumed_tokens"] > 1.5 * 6_000
    part = train("part", f"{flags} --exit-interval 17")
    for _ in range(2):
        part = train("part", f"{flags} --load {part.directory} --exit-interval 17")
        assert part.status == 0, part.err
    assert [row["step"] for row in part.rows] == list(range(1, 41))
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


def test_resume_elsewhere(train: Any, assert_same: Any) -> None:
    """A run may continue in another directory: the first one is left as it was."""
    flags = f"--train-iters 12 {DROPOUT}"
    whole = train("whole", flags)
    first = train("first", f"{flags} --exit-interval 6")
    before = (first.directory / "metrics.jsonl").read_bytes()
    second = train("second", f"{flags} --load {first.directory / 'checkpoints'}")
    assert second.status == 0, second.err
    assert (first.directory / "metrics.jsonl").read_bytes() == before
    assert first.curve() + second.curve() == whole.curve()
    assert_same(second.saved(), whole.saved())


def test_going_back(train: Any, assert_same: Any) -> None:
    """A run that goes back to an older checkpoint writes the rows after it again, in place."""
    flags = f"--train-iters 12 --save-interval 4 {DROPOUT}"
    whole = train("run", flags)
    curve, tensors = whole.curve(), whole.saved(12)
    with (whole.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    again = train("run", f"{flags} --load {whole.directory}/checkpoints/iter_0000008")
    assert again.status == 0, again.err
    assert again.curve() == curve
    assert_same(again.saved(), tensors)


def test_longer_run(train: Any) -> None:
    """A longer run than planned is the same one if only the length changed, by the decay's flag."""
    first = train("run", "--train-iters 6 --lr-decay-iters 12")
    flags = "--train-iters 12 --lr-decay-iters 12"
    more = train("run", f"{flags} --load {first.directory}")
    assert more.status == 0, more.err
    assert more.curve() == train("whole", flags).curve()
    refused = train("run", f"--train-iters 20 --load {first.directory}")
    assert refused.status == 2
    assert "`lr_decay_samples`: checkpoint 48, this run 80" in refused.err


def test_refused_resume_changes_nothing(train: Any, train_once: Any, copy_of: Any) -> None:
    """A run that must not continue leaves metrics, summary and settings of the first part alone."""
    first = copy_of(train_once("--train-iters 4"), "run")
    files = {p: p.read_bytes() for p in first.directory.rglob("*") if p.is_file()}
    for flags in ("--train-iters 9", "--train-iters 4 --num-layers 1", "--train-iters 4 --seed 3"):
        refused = train("run", f"{flags} --load {first.directory}")
        assert refused.status in {1, 2}
        assert refused.err.count("error:") == 1
    assert {p: p.read_bytes() for p in first.directory.rglob("*") if p.is_file()} == files


def test_finetune_in_place_is_refused(train: Any, train_once: Any, copy_of: Any) -> None:
    """Fine-tuning is another run: it does not overwrite the records of the one it starts from."""
    first = copy_of(train_once("--train-iters 4"), "run")
    before = (first.directory / "metrics.jsonl").read_bytes()
    refused = train("run", f"--train-iters 4 --finetune --load {first.directory}")
    assert refused.status == 2
    assert "already contains another run" in refused.err
    assert (first.directory / "metrics.jsonl").read_bytes() == before
    tuned = train("tuned", f"--train-iters 3 --finetune --load {first.directory} --seed 9")
    assert tuned.status == 0, tuned.err
    assert [row["step"] for row in tuned.rows] == [1, 2, 3]
    assert tuned.rows[0]["loss"] < first.rows[0]["loss"]


def test_restart_command(train: Any, tmp_path: Path) -> None:
    """One command starts a run and continues it: `--load` and `--save` on one new directory."""
    flags = "--train-iters 8 --exit-interval 4 --load {0} --save {0}"
    directory = tmp_path / "again"
    first = train("again", flags.format(directory))
    assert first.status == 0, first.err
    assert "starting from initial weights" in first.err
    second = train("again", flags.format(directory))
    assert second.status == 0, second.err
    assert [row["step"] for row in second.rows] == list(range(1, 9))


def test_terminated_run(
    start: Any, finish: Any, signal_after: Any, train: Any, assert_same: Any, tmp_path: Any
) -> None:
    """SIGTERM saves and exits with 0; the continued run equals one that was never stopped."""
    flags = f"--train-iters 2000 {DROPOUT} --lr-decay-iters 2000"
    process = start("part", flags)
    signal_after(process, tmp_path / "part", 5, signal.SIGTERM)
    stopped = finish(process, "part")
    assert stopped.status == 0, stopped.err
    assert stopped.summary["status"] == "received SIGTERM"
    step = stopped.summary["iteration"]
    assert 5 <= step < 2000
    assert "(received SIGTERM)" in stopped.out
    assert stopped.summary["checkpoint"].endswith(f"iter_{step:07d}")
    assert step == len(stopped.rows)
    until = f"{flags} --exit-interval {step + 7}"
    part = train("part", f"{until} --load {stopped.directory}")
    assert part.status == 0, part.err
    whole = train("whole", until)
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


def test_interrupted_twice(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGINT gets out at once, with the shell's status and a summary that says so."""
    submit = StepQueue.submit

    def interrupted(queue: StepQueue, step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        signal.raise_signal(signal.SIGINT)
        submit(queue, step)

    monkeypatch.setattr(StepQueue, "submit", interrupted)
    run = train("run", "--train-iters 4")
    assert run.status == 130, run.err
    assert run.err.rstrip().endswith("interrupted")
    assert "Traceback" not in run.err
    assert run.summary["status"] == "interrupted"
    saved = (run.directory / "checkpoints").glob("iter_*")
    assert not list(saved)


def test_rotary_positions_store_nothing(train: Any) -> None:
    """A Llama continues with a longer sequence, and fine-tuned with other angles."""
    llama = (
        "--position-embedding-type rope --normalization rmsnorm --swiglu "
        "--ffn-hidden-size 24 --group-query-attention --no-add-bias-linear "
        "--untie-embeddings-and-output-weights"
    )
    first = train("run", f"{llama} --train-iters 3")
    assert first.status == 0, first.err
    tensors = first.saved()
    assert "model.output_embedding.weight" in tensors
    assert not any("position" in name or name.endswith("bias") for name in tensors)
    load = f"--load {first.directory}"
    longer = "--seq-length 32 --override-data-order --override-opt-param-scheduler"
    more = train("longer", f"{llama} {longer} --train-iters 5 {load}")
    assert more.status == 0, more.err
    assert [row["step"] for row in more.rows] == [4, 5]
    turned = train("turned", f"{llama} --train-iters 3 --rotary-base 500 {load}")
    assert "rotary_base: checkpoint absent, model 500" in turned.err
    how = "--rotary-base 500 --use-rope-scaling --finetune"
    tuned = train("tuned", f"{llama} --train-iters 2 {how} {load}")
    assert tuned.status == 0, tuned.err
    other = train("other", f"{llama.replace('--swiglu ', '')} --train-iters 3 {load}")
    assert "swiglu: checkpoint True, model False" in other.err


def test_the_manifest_is_read_once(train: Any, train_once: Any, monkeypatch: Any) -> None:
    """A run that resumes reads the manifest of its checkpoint when it finds it, and never again."""
    from lmcore.checkpoint import manifest

    checkpoint = train_once("--train-iters 2").directory / "checkpoints/iter_0000002"
    real, paths = manifest._read_bounded, []

    def read(path: Path, *rest: Any) -> bytes:
        paths.append(path)
        return real(path, *rest)

    monkeypatch.setattr(manifest, "_read_bounded", read)
    run = train("more", f"--train-iters 3 --lr-decay-iters 2 --load {checkpoint}")
    assert run.status == 0, run.err
    assert paths.count(checkpoint / "manifest.json") == 1
