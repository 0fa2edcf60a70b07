"""Whole runs with masked targets: the mean of their loss, kept by a run that resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lmcore.checkpoint import find_checkpoint, read_manifest
from lmcore.checkpoint.manifest import _checksum
from lmcore.data.prepare.plain_text import prepare_documents
from lmcore.data.tokenizer import build_tokenizer

FLAGS = "--eod-mask-loss --global-batch-size 16 --split 80,20,0 --eval-interval 2 --eval-iters 2"
MEANS = "--no-calculate-per-token-loss"
LINE = "the loss is the mean of the micro-batches' means, as in the checkpoint's run"


@pytest.fixture(scope="session")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Iterable[str]], str]:
    """Prepares documents, and returns their prefix."""

    def go(documents: Iterable[str]) -> str:
        folder = tmp_path_factory.mktemp("documents")
        tokenizer = build_tokenizer(
            "ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None
        )
        prepare_documents(documents, tokenizer, folder / "text", source="here")
        return str(folder / "text_text_document")

    return go


@pytest.fixture(scope="session")
def documents(prepare: Any) -> str:
    """Documents of 0 to 40 characters: samples have different numbers of masked targets."""
    return str(
        prepare("so short a line that it may end at any place"[: 7 * n % 41] for n in range(400))
    )


def figures(run: Any) -> list[tuple[float, float]]:
    assert run.status == 0, run.err
    found = [(row["loss"], row["grad_norm"]) for row in run.rows]
    return [*found, *((row["valid_loss"], 0.0) for row in run.rows if "valid_loss" in row)]


def test_size_of_micro_batches(train: Any, documents: str) -> None:
    """Losses, norms and validation agree at any size; with the mean of means they do not."""

    def runs(more: str) -> list[Any]:
        flags = f"{FLAGS} --train-iters 2 {more} --micro-batch-size"
        return [figures(train(f"{n}{more}", f"{flags} {n}", documents)) for n in (16, 1)]

    whole, parts = runs("")
    assert parts == [pytest.approx(pair, rel=1e-6, abs=0) for pair in whole]
    whole, parts = runs(MEANS)
    assert parts[0] != pytest.approx(whole[0], rel=1e-5)


def test_all_targets_masked(train: Any, prepare: Any) -> None:
    """It is an error with the step and its samples, and nothing is saved."""
    run = train("run", f"{FLAGS} --train-iters 2", prepare([""] * 2000))
    assert run.status == 1
    assert "no target counts in the loss of step 1, samples 0 to 15" in run.err
    assert "`--eod-mask-loss`" in run.err
    assert not list(run.directory.glob("checkpoints/iter_*"))


def forget_mean(run: Any) -> None:
    """Remove the mean from a checkpoint and the settings, as lmcore 2026.11 wrote them."""
    path = find_checkpoint(run.directory) / "manifest.json"
    document = json.loads(path.read_text())
    del document["manifest_sha256"]
    del document["meta"]["config"]["config"]["training"]["calculate_per_token_loss"]
    document["manifest_sha256"] = _checksum(document)
    path.write_text(json.dumps(document))
    settings = run.directory / "config.yaml"
    lines = settings.read_text().splitlines(keepends=True)
    settings.write_text("".join(line for line in lines if "per_token_loss" not in line))


def mean_of(run: Any) -> bool:
    meta = read_manifest(find_checkpoint(run.directory)).meta
    return bool(meta["config"]["config"]["training"]["calculate_per_token_loss"])


@pytest.mark.parametrize("continues", ["--continue", "--load"])
def test_run_of_an_older_version(
    train: Any, copy_of: Any, assert_same: Any, documents: str, continues: str
) -> None:
    """It keeps the mean of means, says so in one line, and records it."""
    flags = f"{FLAGS} --train-iters 4"
    whole = train("whole", f"{flags} {MEANS}", documents)
    part = train("part", f"{flags} {MEANS} --exit-interval 2", documents)
    forget_mean(part)
    more = "--exit-interval 100"
    if continues == "--continue":
        argument = f"--continue {part.directory} {more} --save {part.directory}-on"
        resumed = train("part-on", argument, None)
    else:
        resumed = train("part-on", f"{flags} --load {part.directory} {more}", documents)
    assert resumed.status == 0, resumed.err
    assert (resumed.out + resumed.err).count(LINE) == 1
    assert "`calculate_per_token_loss` true" not in resumed.err
    assert not mean_of(resumed)
    assert_same(resumed.saved(), whole.saved())


def test_change_of_the_mean(train: Any, documents: str) -> None:
    """A flag changes it, with a warning; a run that resumes without one keeps it silently."""
    flags = f"{FLAGS} --train-iters 4"
    first = train("first", f"{flags} --exit-interval 2", documents)
    assert mean_of(first)
    kept = train("kept", f"{flags} --load {first.directory}", documents)
    assert kept.status == 0, kept.err
    assert mean_of(kept)
    assert LINE not in kept.out + kept.err
    changed = train("changed", f"{flags} --load {first.directory} {MEANS}", documents)
    assert "`calculate_per_token_loss` true -> false" in changed.err
    assert not mean_of(changed)
