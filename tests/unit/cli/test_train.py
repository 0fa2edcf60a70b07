"""`lmcore train`: bad input as a user meets it, and what is printed at the end.

Whole messages are recorded in `tests/golden/errors/train_*.txt`; `UPDATE_GOLDEN=1 pytest ...`
rewrites them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import unicodedata
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli import run_plan
from lmcore.cli import train as train_command
from lmcore.cli.main import main
from lmcore.config.load import load_config
from lmcore.config.settings import Provenance
from lmcore.data.indexed.metadata import DatasetMetadata, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import NullTokenizer, build_tokenizer
from lmcore.train.report.run_result import RunResult

GOLDEN = Path(__file__).parents[2] / "golden/errors"

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2"
    " --make-vocab-size-divisible-by 8 --num-threads 1 --sample-tokens 0 --eval-iters 0"
    " --train-iters 2 --progress none"
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset, `web_text_document`."""
    folder = tmp_path_factory.mktemp("prepared")
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    (folder / "web.txt").write_text(text[:3_000], "utf-8")
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    prepare_text(folder / "web.txt", tokenizer, folder / "web", document_characters=200)
    (folder / "web.txt").unlink()
    return folder


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with that dataset."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LMCORE_DEVICE", "LMCORE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def arguments(flags: str) -> list[str]:
    words = flags.split()
    pairs = zip(TINY.split()[::2], TINY.split()[1::2], strict=True)
    return ["train", *(w for pair in pairs if pair[0] not in words for w in pair), *words]


def cut(name: str, size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return apply


def other_ids(folder: Path) -> None:
    """Make a dataset whose last document has larger ids than bytes have, without metadata."""
    writer = IndexedDatasetWriter(str(folder / "other"), "uint16")
    for start in (0, 50, 100, 0, 50, 100, 0, 400):
        writer.add_document(list(range(start, start + 50)))
    writer.finish()
    writer.commit()


def foreign_merges(folder: Path) -> None:
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")


def occupy(folder: Path) -> None:
    (folder / "run/checkpoints/iter_0000005").mkdir(parents=True)


def file_in_the_way(folder: Path) -> None:
    (folder / "file").write_text("")


def trained(folder: Path) -> None:
    assert main(arguments("--data-path web_text_document --save first")) == 0


def broken(folder: Path) -> None:
    trained(folder)
    (path,) = (folder / "first/checkpoints/iter_0000002").glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-1])


def numbers(folder: Path) -> None:
    """Make a dataset of another tokenizer, and a list of bad lines."""
    prefix, tokenizer = str(folder / "numbers"), NullTokenizer(9)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2])
    counts = {"documents": 1, "sequences": 1, "tokens": 2, "dtype": "uint16"}
    write_metadata(prefix, DatasetMetadata.of(tokenizer, append_eod=False, **counts))
    lines = ["1 web_text_document", "0 nowhere", "x numbers", "1 numbers", "1 numbers.bin"]
    (folder / "list").write_text("\n".join(lines))


WEB = "--data-path web_text_document"
OTHER = "--data-path other --tokenizer-type ByteTokenizer"
EVALUATE = "--eval-iters 4 --eval-interval 1"

CASES: dict[str, tuple[int, str, Any]] = {
    "flag_misspelt": (2, "--trian-iters 5", None),
    "heads": (2, "--hidden-size 100 --num-attention-heads 3", None),
    "one_round": (
        2,
        (
            "--lr -1 --hidden-size 100 --num-attention-heads 3 --device gpuu --nproc-per-node 3"
            " --pipeline-model-parallel-size 2 --data-path wbe_text_document"
        ),
        None,
    ),
    "positions": (2, "--seq-length 16 --max-position-embeddings 8", None),
    "batch_sizes": (2, "--micro-batch-size 4 --global-batch-size 10", None),
    "data_missing": (2, "--data-path wbe_text_document", None),
    "sources": (2, "--data-path 0 web_text_document 1 wbe 1 numbers.bin 1 numbers", numbers),
    "list": (2, "--data-file-list list", numbers),
    "data_stem": (2, "--data-path web", None),
    "bin_truncated": (1, WEB, cut("web_text_document.bin", 500)),
    "idx_truncated": (1, WEB, cut("web_text_document.idx", 60)),
    "idx_empty": (1, WEB, cut("web_text_document.idx", 0)),
    "no_validation_documents": (1, f"{WEB} {EVALUATE} --split 999999,1,0", None),
    "tokenizer_mismatch": (2, f"{WEB} --tokenizer-type NullTokenizer --vocab-size 300", None),
    "vocabulary_below_ids": (1, f"{OTHER} --split 100,0,0 --train-iters 24", other_ids),
    "vocabulary_below_valid_ids": (1, f"{OTHER} --split 80,20,0 {EVALUATE}", other_ids),
    "no_tokenizer": (2, "--data-path other", other_ids),
    "merges_of_another": (1, "--vocab-file vocab.json --merge-file merges.txt", foreign_merges),
    "save_occupied": (2, f"{WEB} --save run", occupy),
    "save_impossible": (1, f"{WEB} --save file/run", file_in_the_way),
    "device_unknown": (2, "--device tpu", None),
    "precision_unknown": (2, f"{WEB} --save run --precision fp61", None),
    "recompute_unknown": (2, f"{WEB} --save run --recompute half", None),
    "ops_unknown": (2, f"{WEB} --save run --ops attenshun=sdpa", None),
    "kernel_unknown": (2, f"{WEB} --save run --ops attention=sdpaa", None),
    "load_missing": (2, f"{WEB} --save run --load absent", None),
    "load_empty": (2, f"{WEB} --save run --load file", lambda folder: (folder / "file").mkdir()),
    "checkpoint_broken": (1, f"{WEB} --save run --load first", broken),
    "checkpoint_shape": (2, f"{WEB} --save run --load first --hidden-size 16", trained),
    "schedule_changed": (2, f"{WEB} --save run --load first --lr 3e-4", trained),
    "finetune_alone": (2, "--finetune", None),
}


def test_an_unknown_text_comes_with_the_other_errors(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published command, as it is: all that has to be changed is named in one start."""
    flags = "--train-data c4/en --tokenizer-type GPT2BPETokenizer --hidden-size 15"
    assert main(["train", *flags.split()]) == 2
    err = capsys.readouterr().err
    assert "`--train-data c4/en`" in err
    assert err.count("error: ") == 3


@pytest.mark.parametrize("name", CASES)
def test_bad_input(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status and the whole message are as recorded; no traceback, nothing left behind."""
    status, flags, prepare = CASES[name]
    monkeypatch.setenv("LMCORE_PLUGINS", "")  # messages list what is installed
    if prepare is not None:
        prepare(here)
    before = {path for path in here.rglob("*") if "cache" not in str(path)}
    capsys.readouterr()
    found = main(arguments(flags))
    captured = capsys.readouterr()
    message = captured.err[captured.err.index("error: ") :]
    text = f"$ lmcore train {flags}\n{message}[exit status {found}]\n"
    golden = GOLDEN / f"train_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert found == status
    assert captured.out == ""
    assert "Traceback" not in captured.err
    made = {path for path in here.rglob("*") if "cache" not in str(path)} - before
    late = {
        "vocabulary_below_ids",
        "vocabulary_below_valid_ids",
    }  # found when the sample is read: the run has begun by then
    assert name in late or {path.name for path in made} <= {"runs"}


def test_no_stale_recording() -> None:
    """Every recorded message belongs to a case."""
    assert {path.stem for path in GOLDEN.glob("train_*.txt")} == {f"train_{n}" for n in CASES}


def test_world_size(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started by a launcher as one of two processes, it refuses to train the same thing twice."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(arguments(WEB)) == 2
    assert "error: this process is one of 2" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_corrected_run_takes_its_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that saved nothing before it failed does not block the same one put right."""
    other_ids(here)
    run = "--data-path other --save run --split 100,0,0 --train-iters 24 --tokenizer-type"
    assert main(arguments(f"{run} ByteTokenizer")) == 1
    assert (here / "run/tokenizer").is_dir()
    assert main(arguments(f"{run} NullTokenizer --vocab-size 450")) == 0
    assert "NullTokenizer" in (here / "run/tokenizer/tokenizer.json").read_text()
    capsys.readouterr()
    assert main(arguments(f"{run} ByteTokenizer")) == 2
    assert "already contains another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["--optimizer torch.optim:LBFGS", "--load first --hidden-size 16"]
)
def test_failed_start_leaves_no_directory(here: Path, flags: str) -> None:
    """A run that fails after it has prepared its text, before it trains, leaves nothing behind."""
    if "--load" in flags:
        assert main(arguments("--save first")) == 0
    assert main(arguments(f"{flags} --save run")) != 0
    assert not (here / "run").exists()


def test_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout ends with steps, time, directory, checkpoint and the command for more text."""
    assert main(arguments(f"{WEB} --save run --progress plain")) == 0
    captured = capsys.readouterr()
    assert ": 1 layer, hidden 8, 2 heads, " in captured.err
    assert "training  2 steps of 2 x 8 tokens" in captured.err
    lines = captured.out.splitlines()
    assert lines[0].startswith("2 steps in ")
    assert lines[1:] == [
        "run directory   run",
        "checkpoint      run/checkpoints/iter_0000002",
        "more text       lmcore generate --load run --prompt TEXT",
    ]


def test_sample_is_printable(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that has learnt nothing writes any bytes; none of them commands a terminal."""
    assert main(arguments(f"{WEB} --save run --sample-tokens 5 --sample-prompt \x1bA")) == 0
    shown = capsys.readouterr().out
    assert "sample:\n\n\N{REPLACEMENT CHARACTER}A" in shown
    assert {char for char in shown if unicodedata.category(char) == "Cc"} <= {"\n", "\t"}


def test_proposed_command_can_be_pasted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with a space is quoted in the command for more text."""
    assert main([*arguments(WEB), "--save", "my run"]) == 0
    assert "lmcore generate --load 'my run' --prompt TEXT" in capsys.readouterr().out


def test_output_of_an_early_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ended early says why, gives its last validation, and takes no sample."""
    flags = f"{WEB} --save run --train-iters 8 --exit-interval 4 --sample-tokens 5 --split 50,50,0"
    assert main(arguments(f"{flags} --eval-iters 1 --eval-interval 2")) == 0
    out = capsys.readouterr().out
    assert "4 steps in " in out
    assert "(step 4 is a multiple of --exit-interval 4)" in out
    assert "validation loss " in out
    assert "sample" not in out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` explains, and starts nothing."""
    assert main(["train", "--help"]) == 0
    assert "--micro-batch-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    "steps,line",
    [
        (8, "8 steps in 0:27"),
        (1, "1 step in 0:27, 8 in the whole run"),
        (0, "0 steps in 0:27, 8 in the whole run"),
    ],
)
def test_steps_of_a_session(steps: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The time of a session is beside the steps of that session, not of the run before it."""
    summary = {"iteration": 8, "duration": "0:27", "valid_loss": None, "test_loss": None}
    summary |= {"checkpoint": None, "best_valid_step": None}
    result = RunResult(Path("run"), "completed", steps, summary, None, can_generate=True)
    plan: Any = None  # read for a run that was finished before, or whose steps were all skipped
    train_command._report(result, plan)
    assert capsys.readouterr().out.splitlines()[0] == line


def test_a_launcher_decides_over_the_number_of_an_earlier_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is continued may have another number of processes; a flag may not contradict."""
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    loaded = load_config(["--nproc-per-node", "1"])
    rank: Any = SimpleNamespace(local_world_size=2, world_size=2)
    plugins: Any = None
    with pytest.raises(ConfigError, match="a launcher started 2"):
        run_plan._process_count(loaded, rank, plugins, None)
    recorded = {"nproc_per_node": Provenance("file", "run/config.yaml:9", "--nproc-per-node")}
    again = dataclasses.replace(loaded, provenance={**loaded.provenance, **recorded})
    assert run_plan._process_count(again, rank, plugins, None) == 2


@pytest.mark.usefixtures("here")
def test_processes_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint for a wrong number of processes is about the launcher that started them."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert main(["train", "--tensor-model-parallel-size", "2"]) == 2
    said = capsys.readouterr().err
    assert "hint: let the launcher start a multiple of 2 processes, or use smaller sizes" in said
