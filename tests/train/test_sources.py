"""Runs on several sources: blended, resumed, changed in the middle; masks, passes, tests."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lmcore.checkpoint import find_checkpoint, read_manifest
from lmcore.checkpoint.manifest import _checksum
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import build_tokenizer

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
MASKS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


@pytest.fixture(scope="session")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three datasets of 4,000 characters each."""
    folder = tmp_path_factory.mktemp("sources")
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    found = []
    for number in range(3):
        path = folder / f"text{number}.txt"
        path.write_text(text[20_000 * number :][:4_000], "utf-8")
        prepare_text(path, tokenizer, folder / f"set{number}", document_characters=128)
        found.append(str(folder / f"set{number}_text_document"))
    return found


def data_of(run: Any) -> dict[str, Any]:
    """Return the record of its sources in the newest checkpoint of a run."""
    found: dict[str, Any] = read_manifest(find_checkpoint(run.directory)).meta["data"]
    return found


def consumed(run: Any) -> dict[str, int]:
    return {Path(one["name"]).name[:4]: one["consumed"] for one in data_of(run)["sources"]}


@pytest.mark.parametrize("words", ["0.7 {0} 0.3 {1}", "{0} {1} {2}", "1 {2}"])
def test_blend_resumed(train: Any, assert_same: Any, prefixes: list[str], words: str) -> None:
    """A run on several sources in two parts is the run in one."""
    flags = f"--train-iters 20 {DROPOUT} --data-path {words.format(*prefixes)}"
    flags += " --split 80,20,0 --eval-interval 10 --eval-iters 1"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    part = train("part", f"{flags} --exit-interval 11")
    part = train("part", f"{flags} --load {part.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())
    assert sum(consumed(part).values()) == 20 * 4
    assert data_of(part) == data_of(whole)


def forget_rules(run: Any) -> None:
    """Remove the rules of the data order from a checkpoint, as lmcore 2026.11 wrote it."""
    path = find_checkpoint(run.directory) / "manifest.json"
    document = json.loads(path.read_text())
    del document["manifest_sha256"]
    for name in ("split_rule", "blend_rule"):
        del document["meta"]["config"]["config"]["data"][name]
    document["manifest_sha256"] = _checksum(document)
    path.write_text(json.dumps(document))


def rules_of(run: Any) -> list[str]:
    """Return the rules that the newest checkpoint of a run records."""
    meta = read_manifest(find_checkpoint(run.directory)).meta
    return [meta["config"]["config"]["data"][name] for name in ("split_rule", "blend_rule")]


OLDER = "--split-rule legacy --blend-rule lmcore-2026.11"


@pytest.mark.parametrize("kind", ["--data-path", "--train-data-path", "--dataloader-type cyclic"])
def test_run_of_an_older_version(train: Any, prefixes: list[str], kind: str) -> None:
    """A checkpoint without rules continues by the older ones, and so do its successors."""
    if kind == "--train-data-path":
        data = f"{kind} 1 {prefixes[0]}"
    else:
        data = f"--split 90,5,5 {kind} --data-path 0.7 {prefixes[0]} 0.2 {prefixes[1]} 0.1 "
        data = data.replace("--data-path --data-path", "--data-path") + prefixes[2]
    flags = f"--train-iters 6 {data}"
    whole = train("whole", f"{flags} {OLDER}", None)
    assert whole.status == 0, whole.err
    part = train("part", f"{flags} {OLDER} --exit-interval 2", None)
    forget_rules(part)
    for stop in (4, 6):
        part = train("part", f"{flags} --load {part.directory} --exit-interval {stop}", None)
        assert part.status == 0, part.err
        assert rules_of(part) == ["legacy", "lmcore-2026.11"]
    assert part.curve() == whole.curve()
    assert data_of(part) == data_of(whole)
    assert "split_rule: legacy" in (part.directory / "config.yaml").read_text()


def test_rules_of_a_new_run(train: Any, prefixes: list[str]) -> None:
    """A new run has megatron-core's rules; others than the checkpoint's are refused by name."""
    data = f"--split 1,1,1 --data-path 0.7 {prefixes[0]} 0.2 {prefixes[1]} 0.1 {prefixes[2]}"
    flags = f"--train-iters 2 {data} --exit-interval 1"
    run = train("run", flags, None)
    assert rules_of(run) == ["megatron-core", "megatron-core"]
    refused = train("refused", f"{flags} --load {run.directory} --blend-rule lmcore-2026.11", None)
    assert refused.status == 2
    assert "`--blend-rule` is megatron-core in the checkpoint" in refused.err
    tuned = train("tuned", f"{flags} --load {run.directory} --finetune {OLDER}", None)
    assert rules_of(tuned) == ["legacy", "lmcore-2026.11"]


def test_config_of_a_run_with_its_own_training_data(train: Any, prefixes: list[str]) -> None:
    """`config.yaml` names the default split, which divides nothing, and is read back."""
    run = train("run", f"--train-iters 1 --train-data-path {prefixes[0]}", None)
    again = train("again", f"{run.directory}/config.yaml", None)
    assert again.status == 0, again.err


def test_new_weights_in_mid_run(train: Any, assert_same: Any, prefixes: list[str]) -> None:
    """New weights are refused, or requested; then counts continue, and a resume is exact."""
    a, b, c = prefixes
    flags = f"--train-iters 20 {DROPOUT}"
    old, new = f"--data-path 0.75 {a} 0.25 {b}", f"--data-path 0.5 {b} 0.5 {c}"
    first = train("run", f"{flags} {old} --exit-interval 8")
    assert consumed(first) == {"set0": 24, "set1": 8}
    refused = train("refused", f"{flags} {new} --load {first.directory}")
    assert refused.status == 2
    assert "in another order than the checkpoint's" in refused.err
    assert "`--change-blend`" in refused.err
    changed = f"{flags} {new} --change-blend"
    whole = train("whole", f"{changed} --load {first.directory}")
    assert whole.status == 0, whole.err
    assert consumed(whole) == {"set0": 24, "set1": 8 + 24, "set2": 24}
    part = train("part", f"{changed} --load {first.directory} --exit-interval 13")
    assert part.rows[-1]["step"] == 13
    # The flag may stay in a script that restarts: the same blend goes on.
    part = train("part", f"{changed} --load {part.directory} --exit-interval 17")
    part = train("part", f"{flags} {new} --load {part.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())
    assert data_of(part) == data_of(whole)
    back = train("back", f"{flags} {old} --load {part.directory}")
    assert back.status == 2
    assert "sources or weights differ from the checkpoint's" in back.err


def test_longer_run_goes_on_without_repeats(train: Any, prefixes: list[str]) -> None:
    """A run with the same sources lengthens beyond its epochs in its own order."""
    flags = f"--data-path {prefixes[0]} --lr-decay-iters 6 --micro-batch-size 16"
    first = train("run", f"{flags} --train-iters 3")
    longer = f"{flags} --train-iters 50 --exit-interval 23 --load {first.directory}"
    longer = train("longer", longer)
    assert longer.status == 0, longer.err
    assert "the order of its first 48 samples is kept" in longer.err
    (source,) = data_of(longer)["sources"]
    assert source["requested"][0] == 3 * 16
    assert (source["taken"], source["consumed"]) == (3 * 16, 23 * 16)


@pytest.mark.parametrize(
    "flags",
    [
        MASKS,
        "--dataloader-type cyclic",
        pytest.param(f"{MASKS} --recompute full", marks=pytest.mark.full),
    ],
)
def test_resume_with(train: Any, train_once: Any, assert_same: Any, flags: str) -> None:
    """Masks and passes change the run, and leave its resume exact."""
    plain = f"{DROPOUT} --split 80,20,0 --micro-batch-size 16"  # an epoch has 280 samples
    flags = f"--train-iters 25 {plain} {flags}"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    part = train("part", f"{flags} --exit-interval 21")
    part = train("part", f"{flags} --load {part.directory}")
    assert part.status == 0, part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())
    assert train_once(f"--train-iters 1 {plain}").rows[0]["loss"] != whole.rows[0]["loss"]


def test_masked_kernel_is_bound(train: Any) -> None:
    """`kernels.json` says that attention takes a mask; a mask is never dropped on the way."""
    run = train("run", f"--train-iters 1 {MASKS}")
    text = (run.directory / "kernels.json").read_text()
    assert '"masked": true' in text


def test_documents_without_ends(train: Any, tmp_path: Path) -> None:
    """Data without end-of-document tokens cannot be distinguished: refused before training."""
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    (tmp_path / "x.txt").write_text("abc\n\n" * 2000)
    prepare_text(tmp_path / "x.txt", tokenizer, tmp_path / "x", append_eod=False)
    run = train("run", f"--data-path {tmp_path}/x_text_document --reset-position-ids")
    assert run.status == 2
    assert "`--reset-position-ids` cannot detect where documents end" in run.err
    assert "was prepared without end-of-document tokens" in run.err


def test_test_at_the_end(train: Any, prefixes: list[str]) -> None:
    """Test samples are evaluated once, with the weights that training ended with."""
    flags = "--train-iters 4 --eval-iters 1 --eval-interval 4"
    own = f"{flags} --train-data-path {prefixes[0]} --valid-data-path {prefixes[1]}"
    run = train("run", f"{own} --test-data-path {prefixes[1]}", None)
    assert run.status == 0, run.err
    assert run.summary["test_loss"] == run.summary["valid_loss"]
    assert "test at iteration 4 | lm loss value:" in run.err
    assert "test loss" in run.out
    run = train("other", f"{own} --test-data-path {prefixes[2]}", None)
    assert run.summary["test_loss"] != run.summary["valid_loss"]
    run = train("split", f"{flags} --split 80,10,10 --data-path {prefixes[0]}", None)
    assert run.summary["test_loss"] is not None
    run = train("none", f"{flags} --split 949,50,1 --data-path {prefixes[0]}", None)
    assert run.status == 0, run.err
    assert run.summary["test_loss"] is None
    assert "`--split 949,50,1` leaves no test documents" in run.err
    run = train("early", f"{own} --test-data-path {prefixes[1]} --exit-interval 2", None)
    assert run.summary["test_loss"] is None


def test_sources_by_name_and_list(
    train: Any, prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data file list and texts by their names are trained on, and shown.

    A dataset of the working directory comes before one beside the list, which is said.
    """
    (tmp_path / "lists").mkdir()
    for directory, prefix in (("", prefixes[0]), ("lists", prefixes[0]), ("lists", prefixes[1])):
        for suffix in (".bin", ".idx", ".meta.json"):
            shutil.copy(prefix + suffix, tmp_path / directory)
    first, second = (Path(prefix).name for prefix in prefixes[:2])
    (tmp_path / "lists/list.txt").write_text(f"0.6 {first} a\n0.4 {second} b\n")
    monkeypatch.chdir(tmp_path)
    run = train("list", "--train-iters 5 --data-file-list lists/list.txt", None)
    assert run.status == 0, run.err
    assert f"`{first}` is the dataset of the working directory, not `lists/{first}`" in run.err
    assert "2 datasets of --data-file-list" in run.err
    assert consumed(run) == {"set0": 12, "set1": 8}
    run = train("named", "--train-iters 2 --train-data shakespeare --split 90,10,0", None)
    assert run.status == 0, run.err
    assert "corpus shakespeare" in run.err


def test_data_of_two_tokenizers(train: Any, prefixes: list[str], tmp_path: Path) -> None:
    """Datasets whose ids mean different things are never blended."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").write_bytes(Path(prefixes[0] + suffix).read_bytes())
    text = Path(prefixes[0] + ".meta.json").read_text()
    (tmp_path / "x.meta.json").write_text(text.replace('"fingerprint": "', '"fingerprint": "0'))
    run = train("run", f"--data-path {prefixes[1]} {tmp_path}/x", None)
    assert run.status == 2
    assert "were not prepared with the same tokenizer" in run.err


@pytest.mark.distributed
@pytest.mark.parametrize("more", [MASKS, "--dataloader-type cyclic"])
def test_order_on_other_numbers_of_processes(
    train: Any, start: Any, finish: Any, prefixes: list[str], more: str
) -> None:
    """A blend that begins on two processes continues alone with the samples of an unbroken run."""
    flags = f"--train-iters 8 --global-batch-size 8 {more} --data-path 3 {prefixes[0]} 1 "
    flags += prefixes[1]
    whole = train("whole", flags)
    first = finish(start("part", f"{flags} --nproc-per-node 2 --exit-interval 5"), "part")
    assert first.status == 0, first.err
    part = train("part", f"{flags} --load {first.directory}")
    assert part.status == 0, part.err
    losses = [[row["loss"] for row in run.rows] for run in (part, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert data_of(part) == data_of(whole)
