"""The example of a plugin without a device, in whole runs: with it, without it, and turned off."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcore.base.errors import DataError
from lmcore.cli.main import main
from lmcore.data.prepare.named_text import bundled_text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin_extension"
PACKAGE = "lmcore_example_extension"

pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="needs the sources, not the wheel")


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Installs the example for this process, and takes it away again."""
    site = tmp_path / "site"
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    record = site / f"{PACKAGE}-{project['version']}.dist-info"
    record.mkdir(parents=True)
    name = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (record / "METADATA").write_text(name, encoding="utf-8")
    ((group, points),) = project["entry-points"].items()
    lines = "\n".join(f"{key} = {value}" for key, value in points.items())
    (record / "entry_points.txt").write_text(f"[{group}]\n{lines}\n", encoding="utf-8")
    paths = [str(site), str(EXAMPLE / "src")]
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in ("LMCORE_PLUGINS", "LMCORE_PLUGIN_OFF", "LMCORE_DEVICE"):
        monkeypatch.delenv(variable, raising=False)

    def install(there: bool) -> None:
        sys.path[:] = [*(paths if there else []), *(one for one in sys.path if one not in paths)]
        importlib.invalidate_caches()
        for module in [one for one in sys.modules if one.partition(".")[0] == PACKAGE]:
            del sys.modules[module]

    install(True)
    yield install
    install(False)


def events(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_a_run_with_everything_of_it(extension, train, capsys) -> None:
    """Corpus, tokenizer, setting and listener serve a run; generation finds the tokenizer again."""
    run = train(
        "one",
        "--corpus arithmetic --tokenizer-type ArithmeticTokenizer --example-record-events"
        " --train-iters 2 --device cpu",
        prefix=None,
    )
    assert run.status == 0, run.err
    assert "corpus arithmetic: 70," in run.err
    assert [(one["event"], one.get("status")) for one in events(run.directory)] == [
        ("start", None),
        ("end", "completed"),
    ]
    text = (run.directory / "config.yaml").read_text()
    assert "  record_events: true  # --example-record-events\n" in text
    assert "  corpus: arithmetic " in text
    argv = ["generate", "--load", str(run.directory), "--prompt", "1+2=", "--device", "cpu"]
    capsys.readouterr()
    assert main([*argv, "--tokens", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5
    extension(False)
    assert main(argv) == 2
    assert "unknown tokenizer type `ArithmeticTokenizer`" in capsys.readouterr().err


def test_texts_by_their_names_are_one_after_the_other(extension, train) -> None:
    """A plugin's text and lmcore's own are sources of one run, and every document counts once."""
    run = train(
        "one",
        "--train-data arithmetic shakespeare --tokenizer-type ByteTokenizer --train-iters 2"
        " --split 90,10,0 --device cpu",
        prefix=None,
    )
    assert run.status == 0, run.err
    told = re.search(r"2 texts of --train-data: ([\d,]+) tokens, .* ([\d,]+) documents", run.err)
    tokens, documents = (int(number.replace(",", "")) for number in told.groups())
    texts = (EXAMPLE / "src" / PACKAGE / "arithmetic.txt", bundled_text().path)
    assert tokens == sum(text.stat().st_size for text in texts) + documents  # bytes and ends


def test_a_run_outlives_the_plugin(extension, train, capsys) -> None:
    """Generation and resuming need no plugin that only added settings; a file says what to do."""
    run = train("one", "--example-record-events --train-iters 2 --device cpu")
    assert run.status == 0, run.err
    extension(False)
    capsys.readouterr()
    load = ["--load", str(run.directory), "--device", "cpu"]
    assert main(["generate", *load, "--prompt", "A", "--tokens", "3"]) == 0
    flags = "--train-iters 3 --lr-decay-iters 2 --device cpu"
    again = train("two", f"--load {run.directory} {flags}")
    assert again.status == 0, again.err
    config = run.directory / "config.yaml"
    refused = train("three", f"{config} --device cpu")
    assert refused.status == 2
    assert "unknown section `example`" in refused.err
    assert f"install that, or delete the section `example:` from `{config}`" in refused.err


def test_a_run_without_it_by_choice(extension, train) -> None:
    """`--plugin-off` passes the section of a file over, with a line, and nobody listens."""
    run = train("one", "--example-record-events --train-iters 2 --device cpu")
    config = run.directory / "config.yaml"
    # The list of a flag ends at the next flag.
    other = train("two", f"--plugin-off example --device cpu --train-iters 2 -- {config}")
    assert other.status == 0, other.err
    assert "section `example` is ignored" in other.err
    assert not (other.directory / "events.jsonl").exists()
    refused = train("three", "--plugin-off example --example-record-events --device cpu")
    assert refused.status == 2
    assert "unknown flag `--example-record-events`\nwhy: plugin `example` is off" in refused.err


def test_its_options_may_change(extension, train, capsys, monkeypatch) -> None:
    """A checkpoint of a run with another version's options still generates."""
    run = train("one", "--example-record-events --train-iters 2 --device cpu")
    config = run.directory / "config.yaml"
    config.write_text(config.read_text().replace("record_events:", "record_event:"))
    argv = ["generate", "--load", str(run.directory), "--prompt", "A", "--tokens", "3"]
    capsys.readouterr()
    assert main([*argv, "--device", "cpu"]) == 0
    refused = train("two", f"{config} --device cpu")
    assert refused.status == 2
    assert "unknown key `record_event`" in refused.err
    assert "did you mean `record_events`?" in refused.err


def test_help_shows_it(extension, capsys) -> None:
    """Its command and its flags are listed under its own titles."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert (
        "\nplugin example:\n  example-exercises\n              Print arithmetic exercises" in text
    )
    assert main(["train", "--help"]) == 0
    assert "\nplugin example: Options of the example plugin.\n" in capsys.readouterr().out
    assert main(["data", "corpora", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["arithmetic"]["plugin"] == "example"
    assert rows["arithmetic"]["bytes"] < 100_000
    assert rows["shakespeare"]["plugin"] is None


def test_the_corpus_is_what_the_command_prints(extension, capsys) -> None:
    """Its text can be made again by the command, whose exercises are right."""
    assert main(["example-exercises"]) == 0
    text = capsys.readouterr().out
    assert text == (EXAMPLE / "src" / PACKAGE / "arithmetic.txt").read_text(encoding="utf-8")
    for line in text.split():
        exercise, _, result = line.partition("=")
        assert eval(exercise) == int(result)
    assert main(["example-exercises", "--count", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["example-exercises", "--count", "0"]) == 2


def test_its_tokenizer(extension) -> None:
    """Every character of the corpus comes back; others are refused in words."""
    module = importlib.import_module(f"{PACKAGE}.tokenizer")
    tokenizer = module.make_tokenizer(vocab_file=None, merge_file=None, vocab_size=None)
    text = "12+30=42\n 7*8 = 56-0\n"
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text
    assert max(tokenizer.encode(text)) < tokenizer.eod < tokenizer.vocab_size
    with pytest.raises(DataError, match="cannot encode 'x'"):
        tokenizer.encode("1+x")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])
