"""YAML files: lines kept, scalars as written, text that reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import LmcoreError
from lmcore.config.file.yaml_file import PROFILE_KEYS, Entry, read_file, written_value
from lmcore.config.option import options_of
from lmcore.config.section import SECTION_NAMES, run_options
from lmcore.runtime.launch.job.kinds import JOBS


def read(tmp_path: Path, text: str | bytes) -> tuple[list[Entry], list[str]]:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems: list[LmcoreError] = []
    entries = read_file(str(path), problems).entries
    entries = [one for one in entries if one.key or one.section != "a"]
    return entries, [f"{one.what} | {one.why}".replace(f"{tmp_path}/", "") for one in problems]


def test_entries_have_lines(tmp_path: Path) -> None:
    """Sections, keys, scalars and lists come with their line; dashes in keys are underscores."""
    text = "preset: x\n# note\ntraining:\n  train-iters: 5\ndata: {data_path: [a, 'b c']}\nmodel:\n"
    entries, problems = read(tmp_path, text)
    assert problems == []
    assert entries == [
        Entry("", "preset", "x", 1),
        Entry("training", "", None, 3),
        Entry("training", "train_iters", "5", 4),
        Entry("data", "", None, 5),
        Entry("data", "data_path", ["a", "b c"], 5),
        Entry("", "model", None, 6),
    ]


@pytest.mark.parametrize(
    "scalar", ["1e-4", "yes", "no", "on", "1_000", "0o14", "2024-01-01", "1:30"]
)
def test_scalars_stay_as_written(tmp_path: Path, scalar: str) -> None:
    """YAML 1.1 would make a date, a switch or a text of these; the option decides instead."""
    entries, _ = read(tmp_path, f"a:\n  b: {scalar}\n")
    assert entries == [Entry("a", "b", scalar, 2)]


@pytest.mark.parametrize("scalar", ["", "~", "null", "Null"])
def test_null(tmp_path: Path, scalar: str) -> None:
    """An empty value is None."""
    entries, _ = read(tmp_path, f"a:\n  b: {scalar}\n")
    assert entries == [Entry("a", "b", None, 2)]


@pytest.mark.parametrize(
    "text,message",
    [
        ("a: [1\n", "run.yaml:2: not YAML | "),
        ("a:\n  b: 1\n c: 2\n", "run.yaml:3: not YAML | "),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not YAML | a second document begins here"),
        ("a:\n\tb: 1\n", "run.yaml:2: not YAML | the line is indented by a tab"),
        ("<!DOCTYPE html>\n<p>a: b</p>\n", "`run.yaml` is not a file of settings | it begins with"),
        ('{"architectures": ["X"], "model_type": "x"}', "`run.yaml` is not a file of lmcore's"),
        ("- a\n", "`run.yaml` does not hold sections | it begins with `- a`, and the top"),
        ("a:\n  b: 1\n  b: 2\n", "run.yaml:3: `b` is given twice | first on line 2"),
        ("a:\n  b: {c: 1}\n", "run.yaml:2: `b` takes a value or a list of values | "),
        ("a:\n  b: [[1]]\n", "run.yaml:2: `b` takes a value or a list of values | "),
        ("a: &x\n  b: *x\n", "run.yaml:2: `b` takes a value or a list of values | "),
        ("? [1]\n: 2\n", "run.yaml:1: a key must be a name | "),
        ("a:\n  ? [1]\n  : 2\n", "run.yaml:2: a key must be a name | "),
        (b"a: \xff\n", "`run.yaml` is not UTF-8 text | byte 3 cannot be decoded"),
        ("a: 1\n".encode("utf-16"), "`run.yaml` is not UTF-8 text | it is UTF-16"),
        ("a: \x07\n", "run.yaml: not YAML | "),
        ("a:\n  b: !include x.yaml\n", "run.yaml:2: the tag `!include` is not supported | "),
        ("a:\n  b: [1, !env X]\n", "run.yaml:2: the tag `!env` is not supported | "),
        ("a: !new\n  b: 1\n", "run.yaml:1: the tag `!new` is not supported | "),
        ("a:\n  !!python/name:os.path : 1\n", "run.yaml:2: the tag `!!python/name:os.path` is not"),
    ],
)
def test_problems_name_the_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    """Each problem of a file is reported once, with its line if there is one."""
    entries, problems = read(tmp_path, text)
    assert len(problems) == 1
    assert problems[0].startswith(message)
    assert all(
        entry.value is None for entry in entries if entry.key == "b" and "twice" not in message
    )


@pytest.mark.parametrize("dash", ["\N{EN DASH}", "\N{EM DASH}"])
def test_typographic_dash(dash: str) -> None:
    """A flag copied from a formatted page says which character is wrong."""
    problems: list[LmcoreError] = []
    read_file(f"{dash}num-layers", problems)
    assert dash in str(problems[0].hint)
    assert "--" in str(problems[0].hint)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    """A file that cannot be read says why."""
    problems: list[LmcoreError] = []
    assert read_file(str(tmp_path / "absent.yaml"), problems).entries == []
    assert read_file(str(tmp_path), problems).entries == []
    assert problems[0].why == "No such file or directory"
    assert "is a directory, not a file of settings" in problems[1].what


@pytest.mark.parametrize(
    "path, words",
    [
        ("summary.json", "the summary of a run"),
        ("metrics.jsonl", "the step records of a run"),
        ("environment.json", "environment"),
        ("kernels.json", "kernels"),
        ("tokenizer/tokenizer.json", "a tokenizer"),
        ("checkpoints/iter_0000003/manifest.json", "the manifest of a checkpoint"),
        ("checkpoints/iter_0000003", "is a directory"),
        ("checkpoints", "is a directory"),
        ("", "is a directory"),
    ],
)
def test_other_files_of_a_run(tmp_path: Path, path: str, words: str) -> None:
    """A file of a run that holds no settings is one error, which names the run's settings."""
    found = tmp_path / path
    if found.suffix:
        found.parent.mkdir(parents=True, exist_ok=True)
        # More than any file of settings, and lines that are no YAML together.
        found.write_text('{"status": "completed", "a": 1, "b": 2, "c": 3}\n' * 9999)
    else:
        found.mkdir(parents=True, exist_ok=True)
    (tmp_path / "config.yaml").write_text("")
    problems: list[LmcoreError] = []
    assert read_file(str(found), problems).entries == []
    (problem,) = problems
    assert words in problem.render()
    assert f"`{tmp_path / 'config.yaml'}`" in str(problem.hint)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"status": 1, "step": 2, "loss": 3, "tokens": 4}', "none of its 4 keys is a section"),
        ('{"train_batch_size": 8, "fp16": {"enabled": true}}', "--deepspeed-config"),
        ('{"model_type": "gpt2"}', "Hugging Face"),
        ('{"nodes": 2}', "lmcore launch KIND --profile"),
        ('{"wall-time": "1:00:00", "nodse": 2}', "`wall_time` is a key of a profile"),
    ],
)
def test_settings_of_other_programs(tmp_path: Path, text: str, words: str) -> None:
    """A mapping without any section is one error, not one for each key."""
    path = tmp_path / "file.json"
    path.write_text(text)
    problems: list[LmcoreError] = []
    assert read_file(str(path), problems, ["model", "training"]).entries == []
    (problem,) = problems
    assert words in problem.render()
    path.write_text('{"modle": {}, "b": 1, "c": 2, "d": 3}')
    read_file(str(path), problems, ["model", "training"])
    assert len(problems) == 1, "a misspelt section among others is reported by its name"


def test_keys_of_profiles() -> None:
    """A profile is recognized by the keys of every kind of job, and no setting has their names."""
    kinds = JOBS.values()
    assert {one.name for kind in kinds for one in options_of(kind.section)} == PROFILE_KEYS
    assert not PROFILE_KEYS & {*SECTION_NAMES, *run_options()}


def test_empty_file_and_byte_order_mark(tmp_path: Path) -> None:
    """An empty file sets nothing, and a byte-order mark is no part of the first key."""
    assert read(tmp_path, "# nothing\n") == ([], [])
    assert read(tmp_path, b"\xef\xbb\xbfa:\n  b: 1\n")[0] == [Entry("a", "b", "1", 2)]


def test_no_code_is_run(tmp_path: Path) -> None:
    """A tag that would make an object elsewhere is refused; YAML's own are read as text."""
    entries, (problem,) = read(tmp_path, "a:\n  b: !!python/name:os.system x\n")
    assert entries == []
    assert "the tag `!!python/name:os.system` is not supported" in problem
    entries, problems = read(tmp_path, "a:\n  b: !!str 5\n  c: ! 6\n  d: !!int 7\n")
    assert problems == []
    assert [entry.value for entry in entries] == ["5", "6", "7"]


text = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.one_of(text, st.lists(text, max_size=3)))
def test_text_reads_back(tmp_path_factory: pytest.TempPathFactory, value: str | list[str]) -> None:
    """Any text, and any list of texts, survives being written and read."""
    folder = tmp_path_factory.mktemp("yaml")
    entries, problems = read(folder, f"a:\n  b: {written_value(value)}  # note\n")
    assert problems == []
    assert entries == [Entry("a", "b", value, 2, "note")]


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.booleans())
def test_numbers_read_back(number: float, whole: int, switch: bool) -> None:
    """Numbers are written so that nothing is lost, switches in YAML's words."""
    assert float(written_value(number)) == number
    assert int(written_value(whole)) == whole
    assert written_value(switch) == ("true" if switch else "false")
