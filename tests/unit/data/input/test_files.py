"""Choice of input files, and detection of their formats."""

from __future__ import annotations

import gzip
import logging
import os

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.input.files import InputFile, detect_format, find_inputs, resolve_inputs


def test_patterns_are_sorted_and_order_is_kept(tmp_path):
    """Files come in the order given, a pattern's matches in the order of their names."""
    for name in ("b.jsonl", "a.jsonl", "c.txt", "[d].jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "e.jsonl").mkdir()
    given = [str(tmp_path / "c.txt"), str(tmp_path / "?.jsonl"), str(tmp_path / "[d].jsonl")]
    names = [path.rpartition("/")[2] for path in resolve_inputs(given)]
    assert names == ["c.txt", "a.jsonl", "b.jsonl", "[d].jsonl"]


@pytest.mark.parametrize(
    "name, message",
    [("none.jsonl", "no such file"), ("*.csv", "no file matches"), ("", "directory is empty")],
)
def test_input_that_is_not_there_is_named(tmp_path, name, message):
    """A missing file, a pattern without a match and an empty directory are distinguished."""
    with pytest.raises(DataError, match=message):
        resolve_inputs([str(tmp_path / name)])


@pytest.mark.parametrize(
    "pattern, why, hint",
    [
        ("wev*.jsonl", "nearest names in `{}`: `web-1.jsonl`", "check the pattern"),
        ("*.parquet", "no name in `{}` is similar", "check the pattern"),
        ("empty/*.jsonl", "`{}/empty` is empty", "check the pattern"),
        ("gone/*.jsonl", "there is no directory `{}/gone`", "check the pattern"),
        ("{{a,b}}*.csv", "`{}`", "the shell expands them"),
    ],
)
def test_a_pattern_without_a_match(tmp_path, pattern, why, hint):
    """The error names the directory that was searched and the nearest names in it."""
    (tmp_path / "web-1.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        resolve_inputs([f"{tmp_path}/{pattern.format()}"])
    assert why.format(tmp_path) in caught.value.why
    assert hint in caught.value.hint


def test_no_input_is_an_error():
    """An empty list of inputs is an error."""
    with pytest.raises(DataError, match="no input"):
        resolve_inputs([])


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", b"[", "jsonl"),
        ("a.ndjson.zst", b"", "jsonl"),
        ("A.CSV.GZ", b"", "csv"),
        ("a.tsv", b"", "tsv"),
        ("a.txt.xz", b"", "text"),
        ("a.parquet", b"", "parquet"),
        ("a.feather", b"", "arrow"),
        ("a.json", b'{"text": 1}\n', "jsonl"),
        ("a.json", b' \n[{"text": 1}]', "json"),
        ("a.json", b'\xef\xbb\xbf{ \n "text": 1}', "json"),
        ("a.json.gz", gzip.compress(b'{"text": 1}\n', mtime=0), "jsonl"),
        ("a.json.gz", gzip.compress(b"[1]", mtime=0), "json"),
        ("wiki_00", b'{"text": 1}\n', "jsonl"),
        ("part-0", b"PAR1....", "parquet"),
        ("part-0", b"ARROW1..", "arrow"),
    ],
)
def test_format_is_detected_by_name_and_content(tmp_path, name, content, expected):
    """The name without its compression decides; for JSON, and for other names, the content."""
    path = tmp_path / name
    path.write_bytes(content)
    assert detect_format(str(path)).format == expected


def test_standard_input_is_json_lines_unless_said():
    """Of a pipe nothing can be put back: it is JSON lines, or what the user says."""
    assert find_inputs(["-"]) == [InputFile("-", "jsonl")]
    assert find_inputs(["-"], "csv") == [InputFile("-", "csv")]


def test_directory_is_read_recursively_and_sorted(tmp_path, caplog):
    """A directory gives its files of known endings, through links, but no hidden ones and pipes."""
    names = ("b/2.jsonl.gz", "b/1.jsonl", "a.jsonl", ".hidden.jsonl", "_x/1.jsonl", "LICENSE")
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("")
    (tmp_path / "far").mkdir()
    (tmp_path / "far/z.jsonl").write_text("")
    (tmp_path / "in/link").symlink_to(tmp_path / "far")
    (tmp_path / "in/b/loop").symlink_to(tmp_path / "in")
    os.mkfifo(tmp_path / "in/pipe.jsonl")
    with caplog.at_level(logging.WARNING):
        found = find_inputs([str(tmp_path / "in")])
    ends = [file.path.removeprefix(f"{tmp_path}/in/") for file in found]
    assert ends == ["a.jsonl", "b/1.jsonl", "b/2.jsonl.gz", "link/z.jsonl"]
    assert caplog.messages == [
        f"`{tmp_path}/in`: skipped 4 files: `.hidden.jsonl`, `LICENSE`, `_x`, `pipe.jsonl`"
    ]


def test_directory_of_several_formats_is_read_each_by_its_own(tmp_path, caplog):
    """Texts and JSON lines are documents together; a README is none, whatever its ending."""
    about = ("README", "README.txt", "Readme.md", "LICENSE.txt", "sub/README.jsonl", "notes.pdf")
    for name in ("1.jsonl", "2.jsonl.gz", "3.txt", "sub/4.csv", "licenses.txt", *about):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    shown = "`LICENSE.txt`, `README`, `README.txt`, `Readme.md`, `notes.pdf`"
    found = find_inputs([str(tmp_path)])
    assert [(file.path.removeprefix(f"{tmp_path}/"), file.format) for file in found] == [
        ("1.jsonl", "jsonl"),
        ("2.jsonl.gz", "jsonl"),
        ("3.txt", "text"),
        ("licenses.txt", "text"),
        ("sub/4.csv", "csv"),
    ]
    assert caplog.messages == [
        f"`{tmp_path}`: reading files of several formats: 2 jsonl, 2 text, 1 csv",
        f"`{tmp_path}`: skipped 6 files: {shown} and 1 more",
    ]
    assert len(find_inputs([str(tmp_path)], "jsonl")) == 2
    assert len(find_inputs([str(tmp_path)], "text")) == 2
    assert len(find_inputs([str(tmp_path / "README.txt")])) == 1


def test_directory_of_json_and_json_lines_is_of_one_kind(tmp_path):
    """A directory may have `.json` and `.jsonl`: each file's content decides how it is read."""
    (tmp_path / "a.json").write_text('{"text": 1}\n')
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.json").write_text("[1]")
    assert [file.format for file in find_inputs([str(tmp_path)])] == ["jsonl", "jsonl", "json"]


def test_files_without_suffix_are_read_if_the_format_is_given(tmp_path):
    """WikiExtractor's `AA/wiki_00` are found in a directory when the format is given."""
    (tmp_path / "AA").mkdir()
    for name in ("AA/wiki_00", "AA/wiki_01.gz", "notes.md"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match="--input-format"):
        find_inputs([str(tmp_path)])
    found = find_inputs([str(tmp_path)], "jsonl")
    assert [file.path.rpartition("/")[2] for file in found] == ["wiki_00", "wiki_01.gz"]


def test_unknown_format_names_the_nearest(tmp_path):
    """A format that is none is answered with those there are."""
    with pytest.raises(ConfigError, match="did you mean `parquet`"):
        find_inputs(["-"], "parket")


def test_nothing_below_a_directory_is_left_out_in_silence(tmp_path, monkeypatch):
    """A link to nothing and a directory that cannot be read are errors: documents would be lost."""
    (tmp_path / "in/closed").mkdir(parents=True)
    (tmp_path / "in/a.jsonl").write_text("{}")
    assert [file.path for file in find_inputs([str(tmp_path / "in")])] == [
        str(tmp_path / "in/a.jsonl")
    ]
    (tmp_path / "in/b.jsonl").symlink_to("gone")
    with pytest.raises(DataError, match=r"b\.jsonl") as caught:
        find_inputs([str(tmp_path / "in")])
    assert "a symbolic link to nothing" in caught.value.why
    for given in ("in/b.jsonl", "in/*.jsonl"):
        with pytest.raises(DataError, match="cannot read"):
            find_inputs([str(tmp_path / given)])
    (tmp_path / "in/b.jsonl").unlink()
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match="closed") as caught:
        find_inputs([str(tmp_path / "in")])
    assert caught.value.why == "Permission denied"
