"""Records of a run: settings, facts, metrics, summary, events, and notices to plugins."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from lmcore.cli.main import main
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.plugin import discover
from lmcore.plugin.registrations import plugin_sections

FLAGS = (
    "--train-iters 6 --eval-interval 4 --eval-iters 1 --split 80,20,0 --sample-tokens 8"
    " --cpu-peak-seconds 0.05"
)


@pytest.fixture
def run(train_once: Any) -> Any:
    """A run of six steps with two validations."""
    return train_once(FLAGS)


def test_metrics(run: Any) -> None:
    """Every line is a JSON object with the documented keys, steps follow one another."""
    always = {
        *("step", "consumed_samples", "consumed_tokens", "loss", "learning_rate", "grad_norm"),
        *("loss_scale", "tokens_per_second", "step_time_ms", "data_wait_ms", "mfu"),
        *("global_batch_size", "skipped_iterations"),
    }
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    for row in run.rows:
        more = {"valid_loss", "valid_perplexity"} if row["step"] in {4, 6} else set()
        assert set(row) == always | more
        assert all(math.isfinite(value) for value in row.values())
        assert row["consumed_samples"] == 4 * row["step"]
        assert row["consumed_tokens"] == 64 * row["step"]
        assert 0 < row["mfu"] < 2
        assert row["loss_scale"] == 1.0
    last = run.rows[-1]
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))


def test_summary(run: Any) -> None:
    """The summary of a run that completed has its last numbers and what it left."""
    summary, last = run.summary, run.rows[-1]
    assert summary["status"] == "completed"
    assert (summary["iteration"], summary["train_iters"]) == (6, 6)
    assert (summary["loss"], summary["valid_loss"]) == (last["loss"], last["valid_loss"])
    assert summary["valid_step"] == 6
    assert summary["parameter_count"] > 0
    assert Path(summary["checkpoint"]) == run.directory / "checkpoints/iter_0000006"
    assert summary["sample"]["text"]
    assert summary["sample"]["prompt"] in run.out
    assert summary["peak_memory_bytes"] > 0
    assert summary["seconds"] >= 0


def test_config_is_the_run(run: Any, tmp_path: Path) -> None:
    """`config.yaml` loads to the same plan but for the run directory, and starts the same run."""
    path = run.directory / "config.yaml"
    sections = plugin_sections(discover())
    plan = resolve(
        validate(load_config([str(path)], plugins=sections)),
        tokenizer=TokenizerIdentity(vocab_size=257),
    )
    manifest = (run.directory / "checkpoints/iter_0000006/manifest.json").read_text()
    kept = json.loads(manifest)["meta"]["config"]
    kept["config"]["checkpoint"]["save"] = None
    assert json.loads(json.dumps(plan.to_dict()["config"])) == kept["config"]
    assert plan.fingerprint == kept["fingerprint"]
    assert main(["train", str(path), "--save", str(tmp_path / "again")]) == 0
    again = dataclasses.replace(run, directory=tmp_path / "again")
    assert again.curve() == run.curve()


def test_environment_and_kernels(run: Any) -> None:
    """The environment and the bound kernels are recorded, each with its reason."""
    import torch

    environment = json.loads((run.directory / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["selection"]["plugin"] == "cpu"
    ops = json.loads((run.directory / "kernels.json").read_text())["ops"]
    names = [one["op"] for one in ops]
    assert {"attention", "layer_norm", "linear_cross_entropy", "adamw", "grad_norm"} <= set(names)
    assert len(names) == len({json.dumps(one, sort_keys=True) for one in ops})
    assert all(one["chosen"] for one in ops)


def test_files(run: Any) -> None:
    """A run directory holds what its documentation lists, and no temporary file."""
    found = {one.name for one in run.directory.iterdir()}
    assert found == {
        *("config.yaml", "environment.json", "kernels.json", "metrics.jsonl", "summary.json"),
        *("tokenizer", "tensorboard", "checkpoints"),
    }


def test_events(run: Any) -> None:
    """TensorBoard has the losses of `metrics.jsonl`."""
    (path,) = (run.directory / "tensorboard").iterdir()
    data, at, losses = path.read_bytes(), 0, {}
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
        for value in event.summary.value:
            if value.tag == "train/loss":
                losses[event.step] = value.simple_value
    assert losses == {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in run.rows}


def test_output(run: Any) -> None:
    """Stdout has sample, summary and the next command; lines and notices are on stderr, once."""
    assert "6 steps in 0:" in run.out
    assert "validation loss" in run.out
    assert f"lmcore generate --load {run.directory} --prompt TEXT" in run.out
    lines = run.err.splitlines()
    assert sum(line.startswith(" iteration ") for line in lines) == 6
    assert sum(line.startswith(" validation at iteration") for line in lines) == 2
    assert sum("iter_0000006" in line for line in lines) == 1
    assert len(lines) == len(set(lines))
    assert "Traceback" not in run.err


def test_keep_last(train: Any) -> None:
    """`--keep-last` leaves that many checkpoints."""
    run = train("run", "--train-iters 9 --save-interval 2 --keep-last 2")
    names = sorted(path.name for path in (run.directory / "checkpoints").glob("iter_*"))
    assert names == ["iter_0000008", "iter_0000009"]


def test_bf16(train: Any, train_once: Any) -> None:
    """Under bf16 it learns as in fp32 but for rounding, keeping float32 weights."""
    wide = train_once("--train-iters 8")
    narrow = train("narrow", "--train-iters 8 --precision bf16")
    assert narrow.status == 0, narrow.err
    for one, other in zip(wide.rows, narrow.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-2)
    assert [r["loss"] for r in wide.rows] != [r["loss"] for r in narrow.rows]
    assert {str(t.dtype) for n, t in narrow.saved().items() if n[:3] != "rng"} == {"torch.float32"}


def test_fp64(train: Any, train_once: Any) -> None:
    """Under fp64 everything is float64, checkpoints too; fp32 differs from it by rounding alone."""
    wide = train("wide", "--train-iters 8 --precision fp64 --save-interval 4")
    narrow = train_once("--train-iters 8")
    assert wide.status == 0, wide.err
    pairs = [
        (one["loss"], other["loss"]) for one, other in zip(wide.rows, narrow.rows, strict=True)
    ]
    assert all(other == pytest.approx(one, rel=1e-4) for one, other in pairs)
    assert any(one != other for one, other in pairs)
    weights = [tensor for name, tensor in wide.saved().items() if name.startswith("model.")]
    assert {str(tensor.dtype) for tensor in weights} == {"torch.float64"}
    flags = "--train-iters 8 --precision fp64"
    again = train("wide", f"{flags} --load {wide.directory}/checkpoints/iter_0000004")
    assert again.curve() == wide.curve()
    other = train("other", f"--train-iters 8 --load {wide.directory}")
    assert other.status == 1
    assert "Traceback" not in other.err


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "selective",
        "full --recompute-method uniform --recompute-num-layers 2",
        "full --recompute-method block --recompute-num-layers 1",
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recompute(
    train: Any, train_once: Any, assert_same: Any, policy: str, precision: str
) -> None:
    """Recomputation changes memory, not a bit of the numbers, dropout included."""
    flags = f"--train-iters 5 --hidden-dropout 0.1 --attention-dropout 0.1 --precision {precision}"
    plain, other = train_once(flags), train("other", f"{flags} --recompute {policy}")
    assert other.status == 0, other.err
    assert other.curve() == plain.curve()
    assert_same(other.saved(), plain.saved())
    name = policy.partition(" ")[0]
    assert f"recompute {name}: " in other.err
    assert "\nrecompute " not in plain.err


def test_learns(train: Any) -> None:
    """On the bundled text a tiny model goes from a uniform guess to below 3 nats in 60 steps."""
    flags = (
        "--train-iters 60 --num-layers 1 --hidden-size 128 --seq-length 64 --micro-batch-size 16"
        " --lr 5e-3 --lr-warmup-iters 5 --adam-beta2 0.95 --init-method-std 0.05"
        " --eval-interval 60 --eval-iters 2"
    )
    run = train("run", flags, prefix=None)
    assert run.status == 0, run.err
    assert run.rows[0]["loss"] == pytest.approx(math.log(264), abs=0.5)
    assert run.rows[-1]["loss"] < 3.0
    assert run.rows[-1]["valid_loss"] < 3.0
    assert (run.directory / "data").is_dir()


HEARER = """
import json
import os
from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl


@hookimpl
def lmcore_plugin_info():
    return PluginInfo(name="hearer", api=">=1,<2", torch=">=2", provides=())


def note(name, run):
    with open(os.environ["HEARER_FILE"], "a") as file:
        file.write(json.dumps([name, run]) + "\\\\n")


@hookimpl
def lmcore_run_start(run):
    note("start", run)


@hookimpl
def lmcore_run_end(run):
    note("end", run)
    if os.environ.get("HEARER_FAILS"):
        raise RuntimeError("cannot hear")
""".replace("\\\\", "\\")


@pytest.fixture
def hearer(tmp_path: Path) -> dict[str, str]:
    """An installed plugin that records what it receives; the environment that finds it."""
    import os

    site = tmp_path / "site"
    info = site / "lmcore_hearer-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "lmcore_hearer.py").write_text(HEARER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcore-hearer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmcore.plugins]\nhearer = lmcore_hearer\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "HEARER_FILE": str(tmp_path / "heard.jsonl")}


def heard(env: dict[str, str]) -> list[Any]:
    return [json.loads(line) for line in Path(env["HEARER_FILE"]).read_text().splitlines()]


def test_plugins_hear(start: Any, finish: Any, hearer: dict[str, str]) -> None:
    """Plugins are notified of a run's start, with plan and place, and of its end, with status."""
    run = finish(start("run", "--train-iters 3", env=hearer), "run")
    assert run.status == 0, run.err
    (begin, first), (end, last) = heard(hearer)
    assert (begin, end) == ("start", "end")
    assert first["directory"] == str(run.directory)
    assert (first["rank"], first["world_size"]) == (0, 1)
    assert first["plan"]["derived"]["train_iters"] == 3
    assert (last["status"], last["iteration"]) == ("completed", 3)


def test_plugins_are_notified_of_failures(start: Any, finish: Any, hearer: dict[str, str]) -> None:
    """The end of a run that failed is heard of too."""
    run = finish(start("run", "--train-iters 9 --lr 1e30 --clip-grad 0", env=hearer), "run")
    assert run.status == 1
    assert [name for name, _ in heard(hearer)] == ["start", "end"]
    assert heard(hearer)[1][1]["status"].startswith("failed: ")


def test_plugin_that_fails_at_the_end(start: Any, finish: Any, hearer: dict[str, str]) -> None:
    """A plugin that cannot hear of the end spoils no finished run."""
    run = finish(start("run", "--train-iters 3", env=hearer | {"HEARER_FAILS": "1"}), "run")
    assert run.status == 0, run.err
    assert "cannot hear" in run.err
    assert run.summary["status"] == "completed"
