"""Whole runs on corpora by name: prepared once, found again, and refused if they changed."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcore.cli.main import main
from lmcore.data.prepare import corpus
from lmcore.data.prepare.request import PrepareRequest
from lmcore.data.prepare.run import prepare
from lmcore.data.tokenizer import ByteTokenizer

STEPS = "--train-iters 4 --eval-interval 2 --eval-iters 2 --save-interval 2"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards of gzip JSON lines with a corpora file beside a file of settings."""
    monkeypatch.setattr(corpus, "_SETTLED_SECONDS", 0.0)
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    parts = [text[300 * i : 300 * i + 300] for i in range(20)]
    for name, held in {"train-0": parts[:8], "train-1": parts[8:16], "valid": parts[16:]}.items():
        write(tmp_path / f"web/{name}.json.gz", held)
    names = {"web/en": "web/train-*.json.gz", "web/valid": "web/valid.json.gz"}
    (tmp_path / "corpora.yaml").write_text(yaml.safe_dump(names), "utf-8")
    data = {"train_data": ["web/en"], "valid_data": ["web/valid"], "data_cache_path": "cache"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": data}), "utf-8")
    return tmp_path


def write(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        gzip.compress("".join(json.dumps({"text": one}) + "\n" for one in texts).encode())
    )


def test_same_as_prepared_data(train: Any, files: Path) -> None:
    """A run by names has the losses of a run on the same files prepared by the command."""
    run = train("named", f"{files}/run.yaml {STEPS}", None)
    assert run.status == 0, run.err
    assert f"corpus `web/en` ({files}/corpora.yaml:1): reading 2 files" in run.err
    own = []
    for name in ("train-*", "valid"):
        prefix = str(files / name.strip("-*"))
        inputs = (f"{files}/web/{name}.json.gz",)
        prepare(PrepareRequest(inputs, prefix, ByteTokenizer(), append_eod=True))
        own.append(f"{prefix}_text_document")
    flags = f"{STEPS} --train-data-path {own[0]} --valid-data-path {own[1]}"
    assert run.curve() == train("prepared", flags, None).curve()


def test_found_again(
    train: Any, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run, from any folder, and a run with other settings prepare nothing again."""
    run = train("named", f"{files}/run.yaml {STEPS}", None)
    meta = json.loads((run.directory / "checkpoints/iter_0000004/manifest.json").read_text())
    assert sorted(meta["meta"]["corpora"]) == ["web/en", "web/valid"]

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(corpus, "_sha256", refused)
    (files / "else").mkdir()
    monkeypatch.chdir(files / "else")
    load = f"--load {run.directory}/checkpoints/iter_0000002"
    resumed = train("resumed", f"{files}/run.yaml {STEPS} {load}", None)
    assert resumed.curve() == run.curve()[2:]
    assert "settings differ" not in resumed.err
    assert main(["train", "--continue", str(run.directory), "--train-iters", "5"]) == 2
    assert "schedule" in capsys.readouterr().err
    longer = ["--train-iters", "5", "--schedule", "extend"]
    assert main(["train", "--continue", str(run.directory), *longer]) == 0


def test_changed_files(train: Any, files: Path) -> None:
    """Other documents of the same sizes end a resumed run; a flag declares them."""
    run = train("named", f"{files}/run.yaml {STEPS}", None)
    texts = [json.loads(line)["text"] for line in lines_of(files / "web/train-1.json.gz")]
    write(files / "web/train-1.json.gz", [*texts[:-1], texts[-1].swapcase()])
    flags = f"{files}/run.yaml {STEPS} --load {run.directory}/checkpoints/iter_0000002"
    refused = train("refused", flags, None)
    assert refused.status == 2
    assert "corpus `web/en`: the documents are not the checkpoint's" in refused.err
    declared = train("declared", f"{flags} --override-data-order", None)
    assert declared.status == 0, declared.err
    assert "corpus `web/en`: the documents are not the checkpoint's" in declared.err


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


def test_set_of_files(train: Any, files: Path, data_prefix: str) -> None:
    """NAME=FILE is a validation set, prepared as the corpora are."""
    sets = f"--valid-data web={files}/web/valid.json.gz --split 80,20,0"
    run = train("sets", f"{STEPS} {sets}")
    assert run.status == 0, run.err
    assert run.summary["valid_sets"]["web"]["loss"] > 0
    assert (run.directory / "data/corpora").is_dir()


def test_set_of_a_corpus(train: Any, files: Path, data_prefix: str) -> None:
    """NAME=CORPUS is the same set, also in a run that continues from another folder."""
    corpora, split = f"--corpora {files}/corpora.yaml", "--split 80,20,0"
    run = train("named", f"{STEPS} --valid-data web=web/valid {split} {corpora}")
    assert run.status == 0, run.err
    by_path = train("path", f"{STEPS} --valid-data web={files}/web/valid.json.gz {split}")
    assert run.summary["valid_sets"] == by_path.summary["valid_sets"]
    flags = ["--train-iters", "6", "--schedule", "extend"]
    assert main(["train", "--continue", str(run.directory), *flags]) == 0
    assert json.loads((run.directory / "summary.json").read_text())["valid_sets"]["web"]["loss"] > 0


@pytest.mark.full
def test_two_processes(start: Any, finish: Any, files: Path) -> None:
    """One of two processes prepares, and both train on it."""
    flags = f"{files}/run.yaml {STEPS} --nproc-per-node 2 --data-path none --global-batch-size 8"
    run = finish(start("pair", flags), "pair")
    assert run.status == 0, run.err
    assert run.err.count("preparing it in") == 2
