"""Runs that are logged by the packages themselves, without a server: `tox -e loggers`."""

from __future__ import annotations

import csv
import json
import struct

import pytest

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # the packages' own
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def continued(train, flags):
    """Train two steps, then one more in the same directory; return the run."""
    first = train("run", f"--train-iters 2 --no-tensorboard {flags}")
    assert first.status == 0, first.err
    again = train(
        "run",
        f"--train-iters 3 --no-tensorboard {flags} --load {first.directory} --schedule extend",
    )
    assert again.status == 0, again.err
    assert "warning" not in first.err + again.err
    return again


def records_of(data):
    """Yield the records of an offline file, which has LevelDB's log format behind 7 bytes."""
    at, held = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            return
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            yield held
            held = b""


def test_wandb(train):
    """Offline files of both sessions have one identity, and a record of each step."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run = continued(train, "--wandb-project poems --wandb-entity team --wandb-exp-name mine")
    folders = sorted((run.directory / "wandb").glob("offline-run-*"))
    identity = json.loads((run.directory / "loggers.json").read_text())["wandb"]
    assert [one.name.rpartition("-")[2] for one in folders] == [identity] * 2
    losses = {}
    for folder in folders:
        for data in records_of(next(folder.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                shown = (record.run.project, record.run.entity, record.run.display_name)
                assert shown == ("poems", "team", "mine")
            items = {
                one.key or ".".join(one.nested_key): json.loads(one.value_json)
                for one in record.history.item
            }
            if "train/loss" in items:
                losses[items["step"]] = items["train/loss"]
    assert losses == {row["step"]: pytest.approx(row["loss"]) for row in run.rows}


@pytest.mark.parametrize("store", ["", "file:{directory}/store"])
def test_mlflow(train, tmp_path, store):
    """Both sessions are one run, which is finished, with the loss of each step and the sample."""
    mlflow = pytest.importorskip("mlflow")
    place = store.format(directory=tmp_path)
    flags = f" --mlflow-tracking-uri {place}" if place else ""
    run = continued(train, f"--mlflow-experiment poems --sample-tokens 8{flags}")
    client = mlflow.MlflowClient(place or f"sqlite:///{run.directory}/mlflow.db")
    experiment = client.get_experiment_by_name("poems")
    (found,) = client.search_runs([experiment.experiment_id])
    identity = json.loads((run.directory / "loggers.json").read_text())["mlflow"]
    assert (found.info.run_id, found.info.status) == (identity, "FINISHED")
    assert found.data.params["training.train_iters"] == "2"
    history = client.get_metric_history(identity, "train/loss")
    assert {one.step: one.value for one in history} == {
        row["step"]: row["loss"] for row in run.rows
    }
    names = [one.path for one in client.list_artifacts(identity)]
    assert names == ["sample-2.txt", "sample-3.txt"]


def test_codecarbon(train, tmp_path):
    """A row of energy in kWh and carbon dioxide in kg for each session, and both in the summary."""
    pytest.importorskip("codecarbon")
    run = continued(train, f"--codecarbon-dir {tmp_path / 'energy'} --codecarbon-country fra")
    with (tmp_path / "energy/emissions.csv").open() as file:
        first, last = csv.DictReader(file)
    assert first["country_name"] == last["country_name"] == "France"
    assert first["project_name"] == "run"
    numbers = run.summary["loggers"]["codecarbon"]
    assert min(numbers.values()) > 0
    assert numbers["energy_kwh"] == pytest.approx(float(last["energy_consumed"]))
    assert numbers["co2_kg"] == pytest.approx(float(last["emissions"]))
    # France's electricity: some tens of grams of CO2 for one kWh.
    assert 0.01 < numbers["co2_kg"] / numbers["energy_kwh"] < 0.2


def test_wandb_without_a_key(train, monkeypatch, tmp_path):
    """Online without an API key it does not ask: one warning says how to log in."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = train("run", "--train-iters 2 --wandb-project poems")
    assert run.status == 0, run.err
    assert run.err.count("no API key for Weights & Biases; run `wandb login`") == 1
