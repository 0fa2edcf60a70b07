"""Preparation: JSON lines to datasets, the same bytes for any number of workers."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

import lmcore
from lmcore.base.errors import ConfigError, DataError, RunError
from lmcore.data import worker_pool
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import metadata_path, read_metadata
from lmcore.data.input.options import InputOptions
from lmcore.data.prepare.plain_text import documents_from_text, prepare_text
from lmcore.data.prepare.run import PrepareProgress, PrepareRequest, prepare
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, NullTokenizer
from lmcore.data.tools.inspect import inspect

# Where lmcore was imported from: the sources, or an installed wheel.
IMPORTED_FROM = Path(lmcore.__file__).resolve().parents[1]


def lines(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def request(inputs, prefix, **changes) -> PrepareRequest:
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    arguments = {"tokenizer": ByteTokenizer(), **changes}
    return PrepareRequest(names, str(prefix), **arguments)


def documents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def test_documents_end_with_eod_and_are_counted_with_it(tmp_path):
    """Each document ends with eod, sizes count it, and sizes and `.bin` agree (upstream's trap)."""
    source = lines(tmp_path / "in", {"text": "ab"}, {"text": "é", "id": 7})
    report = prepare(request(source, tmp_path / "out", append_eod=True))
    prefix = tmp_path / "out_text_document"
    assert documents(prefix) == [[97, 98, 256], [0xC3, 0xA9, 256]]
    assert IndexedDataset(prefix).sizes.tolist() == [3, 3]
    assert (tmp_path / "out_text_document.bin").stat().st_size == 6 * 2
    (output,) = report.outputs
    assert (output.documents, output.tokens, output.bytes, output.dtype) == (2, 6, 12, "uint16")
    assert report.documents == 2
    assert report.json_bytes == Path(source).stat().st_size


def test_without_eod_documents_are_the_text_alone(tmp_path):
    """Without `append_eod` no id is added."""
    prepare(request(lines(tmp_path / "in", {"text": "ab"}), tmp_path / "out"))
    assert documents(tmp_path / "out_text_document") == [[97, 98]]


def test_every_key_is_complete(tmp_path):
    """Two keys give two complete datasets; upstream finishes only the last one."""
    source = lines(tmp_path / "in", {"a": "x", "b": "yz"}, {"a": "", "b": "w"})
    report = prepare(request(source, tmp_path / "out", json_keys=("a", "b")))
    assert documents(tmp_path / "out_a_document") == [[120]]
    assert documents(tmp_path / "out_b_document") == [[121, 122], [119]]
    assert [output.empty for output in report.outputs] == [1, 0]
    assert inspect(tmp_path / "out_a_document").problems == ()


def test_published_fixture_is_reproduced(shared_data, tmp_path):
    """The JSON lines of a foreign test set give that set's two files, byte for byte."""

    class Unchecked(NullTokenizer):
        encodes_any_text = True

        def encode(self, text):  # upstream's type lets ids beyond its vocabulary pass
            return [int(word) for word in text.split()]

    folder = shared_data / "interop/megatron_indexed"
    source = str(folder / "test_text_document.jsonl")
    prepare(request(source, tmp_path / "test", tokenizer=Unchecked(131072), append_eod=True))
    for ending in (".bin", ".idx"):
        made = (tmp_path / f"test_text_document{ending}").read_bytes()
        assert made == (folder / f"test_text_document{ending}").read_bytes()


def test_bytes_do_not_depend_on_the_number_of_workers(shared_data, tmp_path):
    """One, two and three processes write the same files from real text."""
    tiny = shared_data / "tokenizers/gpt2-tiny"
    tokenizer = GPT2BPETokenizer(
        str(tiny / "gpt2-tiny-vocab.json"), str(tiny / "gpt2-tiny-merges.txt")
    )
    source = str(shared_data / "corpora/web/*.gz")
    made = []
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        prepare(
            request(source, folder / "w", tokenizer=tokenizer, append_eod=True, workers=workers)
        )
        made.append(digests(folder))
    assert len(made[0]) == 3
    assert made[0] == made[1] == made[2]
    assert inspect(tmp_path / "1/w_text_document").problems == ()


def test_text_comes_back_from_the_dataset(gpt2, shared_data, tmp_path):
    """Decoded documents are the texts of the corpus, in order."""
    source = str(shared_data / "corpora/wikitext-2/wikitext2-valid-raw-detok.jsonl")
    prepare(request(source, tmp_path / "w", tokenizer=gpt2))
    texts = [json.loads(line)["text"] for line in Path(source).read_bytes().splitlines()]
    made = documents(tmp_path / "w_text_document")
    assert [gpt2.decode(ids) for ids in made] == [text for text in texts if text]


BAD = {
    "broken": (b'{"text": "a"\n', "line 2: broken JSON"),
    "not utf-8": (b'{"text": "\xff"}\n', "line 2: not UTF-8"),
    "no key": (b'{"txet": "a"}\n', "line 2: key missing"),
    "not a string": (b'{"text": 5}\n', "line 2: not a string"),
    "null": (b'{"text": null}\n', "line 2: not a string"),
    "array": (b'[{"text": "a"}]\n', "line 2: broken JSON"),
    "number": (b"12\n", "line 2: broken JSON"),
    "surrogate": (b'{"text": "\\ud800"}\n', "line 2: not encodable"),
    "deep": (b"[" * 100_000 + b"\n", "line 2: broken JSON"),
    "huge number": (b'{"n": ' + b"1" * 5000 + b', "text": "a"}\n', "line 2: broken JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_stops_with_its_number(tmp_path, name):
    """A line that cannot be used stops the run, named by file and line; no file is left."""
    bad, message = BAD[name]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "good"}\n' + bad + b"{\n")
    with pytest.raises(DataError) as caught:
        prepare(request(str(source), tmp_path / "out"))
    assert f"`{source}` {message}" == caught.value.what
    assert name in {"no key", "array"} or "--on-error skip" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_skipped_and_counted(tmp_path, name, caplog):
    """With `skip` the good documents stay, the line is counted by reason and logged once."""
    bad, message = BAD[name]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "a"}\n' + bad + b'\n  \n{"text": "b"}\n' + bad)
    with caplog.at_level(logging.WARNING):
        report = prepare(request(str(source), tmp_path / "out", on_error="skip"))
    assert documents(tmp_path / "out_text_document") == [[97], [98]]
    reason = message.partition(": ")[2]
    assert report.skipped == {reason: 2}
    assert report.documents == 2
    assert len(caplog.records) == 1
    assert "line 2" in caplog.text


def test_hint_names_the_nearest_key_and_the_format_of_an_array(tmp_path):
    """A misspelt key is answered with the nearest, an array with the format that reads it."""
    source = lines(tmp_path / "in", {"content": "a"})
    with pytest.raises(DataError, match="did you mean `--json-keys content`"):
        prepare(request(source, tmp_path / "out", json_keys=("contents",)))
    (tmp_path / "array").write_text('[\n {"text": "a"}\n]\n', encoding="utf-8")
    with pytest.raises(DataError, match="--input-format json"):
        prepare(request(str(tmp_path / "array"), tmp_path / "out"))


def test_hint_of_a_byte_order_mark_and_of_a_surrogate_is_of_use(tmp_path, hand_made):
    """A mark in the middle, and half a surrogate pair, are reported with the fix."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' * 2)
    for tokenizer in (ByteTokenizer(), hand_made):
        with pytest.raises(DataError, match="line 2: broken JSON") as caught:
            prepare(request(str(source), tmp_path / "out", tokenizer=tokenizer))
        assert "byte-order mark" in caught.value.why
        assert r"sed -i 's/^\xEF\xBB\xBF//' FILE" in caught.value.hint
    source.write_text('{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match="line 1: not encodable") as caught:
        prepare(request(str(source), tmp_path / "out"))
    assert caught.value.hint.startswith("repair such texts with `lmcore data clean fix`")


def test_first_bad_line_is_named_whatever_the_workers(tmp_path):
    """With several workers the error names the first bad line of the input."""
    source = tmp_path / "in"
    source.write_bytes((b'{"text": "good"}\n' * 700 + b"bad\n") * 3)
    with pytest.raises(DataError, match="line 701:"):
        prepare(request(str(source), tmp_path / "out", workers=3))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_tokenizer_that_refuses_a_text_names_the_line(tmp_path):
    """Text that a tokenizer cannot encode is a bad line like any other."""
    source = lines(tmp_path / "in", {"text": "1 2"}, {"text": "1 x"}, {"text": "3"})
    tokenizer = NullTokenizer(10)
    with pytest.raises(DataError, match="line 2: not encodable"):
        prepare(request(source, tmp_path / "out", tokenizer=tokenizer))
    report = prepare(request(source, tmp_path / "out", tokenizer=tokenizer, on_error="skip"))
    assert report.skipped == {"not encodable": 1}
    assert documents(tmp_path / "out_text_document") == [[1, 2], [3]]


def test_text_that_was_left_out_is_counted_where_none_is_left(tmp_path):
    """The error counts the reasons if every document with text was skipped."""
    source = lines(tmp_path / "in", {"text": "words"}, {"text": ""}, {"text": "more"}, {"id": 1})
    with pytest.raises(DataError, match="no text under the key") as caught:
        prepare(request(source, tmp_path / "out", tokenizer=NullTokenizer(10), on_error="skip"))
    assert caught.value.why == (
        "skipped: 1 key missing, 2 not encodable; empty in the other 1 document"
    )
    assert caught.value.hint == "`--on-error stop` shows the first skipped one"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no documents"),
        (b"\n\n", "no documents"),
        (b'{"text": ""}\n', "no text under the key"),
        (b"bad\n", "no documents"),
    ],
)
def test_empty_corpus_is_an_error(tmp_path, content, message):
    """No documents, or none with text, is an error that leaves no files."""
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(request(str(tmp_path / "in"), tmp_path / "out", on_error="skip", append_eod=True))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"json_keys": ()}, "at least one"),
        ({"json_keys": ("a", "a")}, "different keys"),
        ({"json_keys": ("a/b",)}, "file name"),
        ({"workers": 0}, "at least 1"),
        ({"log_interval": 0}, "at least 1"),
        ({"output_prefix": "out/"}, "`--output-prefix out/` does not end"),
        ({"output_prefix": ""}, "does not end with a file name"),
        ({"output_prefix": "out/."}, "does not end with a file name"),
    ],
)
def test_impossible_request_is_refused(tmp_path, changes, message):
    """Keys, workers and intervals that cannot be are refused before anything is read."""
    with pytest.raises(ConfigError, match=message):
        prepare(replace(request("nowhere", tmp_path / "out"), **changes))


@pytest.mark.parametrize("other", ["in", "link", "hard", "i*"])
def test_file_given_twice_is_refused(tmp_path, other):
    """A file that comes twice, by name, link or pattern, is reported before anything is read."""
    source = lines(tmp_path / "in", {"text": "a"})
    if other == "link":
        (tmp_path / other).symlink_to(source)
    elif other == "hard":
        (tmp_path / other).hardlink_to(source)
    told = "are the same file" if other in {"link", "hard"} else "`.*/in` is given twice"
    with pytest.raises(ConfigError, match=told):
        prepare(request([source, str(tmp_path / other)], tmp_path / "out"))
    assert not (tmp_path / "out.partial").exists()


def test_append_eod_needs_an_eod(tmp_path):
    """A vocabulary without end-of-document token refuses `append_eod`."""
    tokenizer = ByteTokenizer()
    tokenizer.eod = None
    with pytest.raises(ConfigError, match="no end-of-document"):
        prepare(request("x", tmp_path / "out", tokenizer=tokenizer, append_eod=True))


def test_failure_leaves_older_datasets(tmp_path):
    """A run that fails leaves the files of an earlier one exactly as they were."""
    good = lines(tmp_path / "good", {"a": "x", "b": "y"})
    prepare(request(good, tmp_path / "out", json_keys=("a", "b")))
    before = digests(tmp_path)
    (tmp_path / "good").write_text('{"a": "new", "b": "new"}\nbroken\n', encoding="utf-8")
    with pytest.raises(DataError):
        prepare(request(good, tmp_path / "out", json_keys=("a", "b"), overwrite=True))
    (tmp_path / "good").write_text('{"a": "x", "b": "y"}\n', encoding="utf-8")
    assert digests(tmp_path) == before


def test_progress_is_megatron_s_line(tmp_path):
    """The callback comes every interval and at the end; a MB is 2**20 bytes of JSON."""
    source = tmp_path / "in"
    source.write_bytes(b'{"text": "abc"}\n' * 2000)
    seen = []
    small = InputOptions(batch_bytes=16 * 512)
    prepare(request(str(source), tmp_path / "out", log_interval=600, reading=small), seen.append)
    assert [progress.documents for progress in seen] == [1024, 2000, 2000]
    assert [progress.fraction for progress in seen] == pytest.approx([0.512, 1, 1])
    assert seen[-1].json_bytes == source.stat().st_size
    line = PrepareProgress(documents=1000, json_bytes=3 * 2**20, seconds=2.0).line()
    assert line == "Processed 1000 documents (500.0 docs/s, 1.50 MB/s)."


def test_metadata_says_what_made_the_dataset(bpe_files, tmp_path):
    """The metadata has the tokenizer, its fingerprint, eod and the counts."""
    tokenizer = GPT2BPETokenizer(*map(str, bpe_files))
    source = lines(tmp_path / "in", {"text": "hello"})
    prepare(request(source, tmp_path / "out", tokenizer=tokenizer, append_eod=True))
    metadata = read_metadata(tmp_path / "out_text_document")
    assert metadata.tokenizer == tokenizer.describe()
    assert metadata.fingerprint == tokenizer.fingerprint()
    assert (metadata.vocab_size, metadata.eod, metadata.append_eod) == (265, 264, True)
    assert (metadata.documents, metadata.sequences, metadata.tokens) == (1, 1, 2)
    assert read_metadata(tmp_path / "other") is None
    metadata_path(tmp_path / "out_text_document").write_text("{}")
    with pytest.raises(DataError, match="has no `tokenizer`"):
        read_metadata(tmp_path / "out_text_document")


def test_killed_worker_stops_the_run_and_says_where(tmp_path, monkeypatch):
    """The error after a worker's death names its lines, and no file is left."""
    source = tmp_path / "in"
    good = b'{"text": "good"}\n'
    source.write_bytes(good * 1024 + b'{"text": "die"}\n' + good * 4000)
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "from lmcore.data.tokenizer import ByteTokenizer\n\n\n"
        "class Deadly(ByteTokenizer):\n"
        "    def encode_batch(self, texts):\n"
        '        if "die" in texts:\n'
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().encode_batch(texts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import deadly

    (tmp_path / "made").mkdir()
    with pytest.raises(RunError) as caught:
        prepare(
            request(
                str(source),
                tmp_path / "made/out",
                tokenizer=deadly.Deadly(),
                workers=2,
                reading=InputOptions(batch_bytes=len(good) * 512),
            )
        )
    assert caught.value.what.endswith("in shard 1")
    assert "1025-1536" in caught.value.why
    assert list((tmp_path / "made").iterdir()) == []


def test_tokenizer_that_cannot_travel_is_refused(tmp_path):
    """A tokenizer that cannot be pickled is refused with the way out."""
    tokenizer = ByteTokenizer()
    tokenizer.handle = (tmp_path / "open").open("w")
    try:
        with pytest.raises(ConfigError, match="--workers 1"):
            prepare(
                request(
                    lines(tmp_path / "in", {"text": "a"}),
                    tmp_path / "out",
                    tokenizer=tokenizer,
                    workers=2,
                )
            )
    finally:
        tokenizer.handle.close()


def test_batches_under_way_are_bounded(monkeypatch):
    """The pool never reads further ahead than twice its workers."""
    from concurrent.futures import Future

    read = []

    class Pool:
        def submit(self, function, batch):
            future = Future()
            future.set_result(batch)
            return future

    class Batch:
        where = "here"

    def batches():
        for i in range(50):
            read.append(i)
            yield Batch()

    results = worker_pool._in_order(Pool(), str, batches(), depth=4, done="encoded")
    next(results)
    assert len(read) == 4
    assert len(list(results)) == 49


INTERRUPTED = """
    import sys
    from lmcore.data.input.options import InputOptions
    from lmcore.data.prepare.run import PrepareRequest, prepare
    from lmcore.data.tokenizer import ByteTokenizer

    if __name__ == "__main__":
        request = PrepareRequest(
            ("-",), sys.argv[1], ByteTokenizer(), workers=int(sys.argv[2]), log_interval=1,
            reading=InputOptions(batch_bytes=4096),
        )
        prepare(request, lambda progress: print("going", flush=True))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_interrupt_leaves_no_file(tmp_path, workers):
    """Ctrl-C in the middle of a stream ends all processes and leaves nothing behind."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    (tmp_path / "made").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "made/out"), workers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(IMPORTED_FROM)},
        start_new_session=True,
    )
    process.stdin.write(b'{"text": "good"}\n' * 2000)
    process.stdin.flush()
    assert process.stdout.readline() == b"going\n"
    assert list((tmp_path / "made").iterdir())
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0
    assert errors.count(b"KeyboardInterrupt") == 1
    assert list((tmp_path / "made").iterdir()) == []


def test_full_disk_leaves_no_file(tmp_path):
    """The error says that the disk is full, and no partial file is left."""
    source = tmp_path / "in"
    source.write_bytes(b'{"text": "%s"}\n' % (b"x" * 1000) * 4000)
    (tmp_path / "made").mkdir()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DataError, match="cannot write"):
            prepare(request(str(source), tmp_path / "made/out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "made").iterdir()) == []


def test_workers_end_with_their_parent(tmp_path):
    """Workers end if the main process is killed."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out"), "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(IMPORTED_FROM)},
        start_new_session=True,
    )
    process.stdin.write(b'{"text": "good"}\n' * 2000)
    process.stdin.flush()
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdin.close()
    deadline = time.monotonic() + 60
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.stdout.close()
    assert not _group_lives(process.pid)


def _group_lives(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    """Documents end at blank lines once they are long enough; joined they are the text."""
    text = "".join(f"line {i}\n" + ("\n" if i % 5 == 0 else "") for i in range(300)) + "end"
    (tmp_path / "t").write_text(text, encoding="utf-8")
    made = list(documents_from_text(tmp_path / "t", document_characters=100))
    assert "".join(made) == text
    assert all(document.endswith("\n\n") for document in made[:-1])
    assert all(100 <= len(document) < 160 for document in made[:-1])


def test_plain_text_without_blank_lines_is_cut_at_lines(tmp_path):
    """A document without a blank line ends at four times the requested length."""
    (tmp_path / "t").write_text("0123456789\n" * 100, encoding="utf-8")
    made = list(documents_from_text(tmp_path / "t", document_characters=25))
    assert {len(document) for document in made} == {110}


def test_plain_text_of_a_play_trains(shared_data, tmp_path):
    """Tinyshakespeare gives hundreds of documents, enough for every part of the default split."""
    from lmcore.config.derived.split import parse_split
    from lmcore.data.blend.train_split import split_ranges

    source = shared_data / "corpora/tinyshakespeare.txt"
    report = prepare_text(source, ByteTokenizer(), tmp_path / "play")
    dataset = IndexedDataset(tmp_path / "play_text_document")
    assert dataset.document_count == report.documents > 300
    assert dataset.tokens == source.stat().st_size + report.documents
    text = b"".join(bytes(ids[:-1]) for ids in documents(tmp_path / "play_text_document"))
    assert text == source.read_bytes()
    split_ranges(report.documents, parse_split("969,30,1"), needed=("train", "valid"))


def test_plain_text_errors(tmp_path):
    """Empty and foreign files are refused, the line named; no file is left."""
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        prepare_text(tmp_path / "t", ByteTokenizer(), tmp_path / "out")
    (tmp_path / "t").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        prepare_text(tmp_path / "t", ByteTokenizer(), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_compressed_input_and_key_order(tmp_path):
    """Compressed files of several members are read to their end, in the order given."""
    parts = [gzip.compress(json.dumps({"text": c}).encode() + b"\n") for c in "abc"]
    (tmp_path / "in.json.gz").write_bytes(b"".join(parts))
    prepare(request(str(tmp_path / "*.gz"), tmp_path / "deep/down/out"))
    assert documents(tmp_path / "deep/down/out_text_document") == [[97], [98], [99]]


def test_inspect_describes_and_finds_what_does_not_fit(tmp_path):
    """A report has the counts; metadata of another dataset and cut files are problems."""
    source = lines(tmp_path / "in", {"text": "abcd"}, {"text": "ef"})
    prepare(request(source, tmp_path / "out"))
    prefix = tmp_path / "out_text_document"
    report = inspect(prefix)
    assert (report.documents, report.sequences, report.tokens, report.dtype) == (2, 2, 6, "uint16")
    assert (report.mean_length, report.max_length, report.empty_sequences) == (3.0, 4, 0)
    assert report.bytes == 12 + 34 + 2 * 12 + 3 * 8
    assert (report.tokenizer, report.problems) == ("ByteTokenizer", ())
    assert json.loads(json.dumps(report.to_json()))["tokens"] == 6

    values = json.loads(metadata_path(prefix).read_text())
    metadata_path(prefix).write_text(json.dumps({**values, "tokens": 7}))
    assert inspect(prefix).problems == ("the metadata says tokens 7, the dataset has 6",)

    Path(f"{prefix}.bin").write_bytes(b"\0" * 5)
    report = inspect(prefix)
    assert report.tokens == 6  # as the index counts
    assert "expected 12 bytes, found 5" in report.problems[0]

    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match="no such file"):
        inspect(prefix)


def test_data_without_torch():
    """Tokenizers, datasets and preparation load no torch."""
    modules = (
        "tokenizer indexed.dataset indexed.writer prepare.run prepare.plain_text tools.inspect "
        "dataset.gpt blend.train_split blend.index"
    )
    imports = "; ".join(f"import lmcore.data.{name}" for name in modules.split())
    check = f"{imports}; import sys; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(IMPORTED_FROM)}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
