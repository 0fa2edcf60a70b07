"""Interrupted and continued: whatever happens in the middle, the bytes at the end are the same."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lmcore
from lmcore.base.errors import ConfigError, DataError, RunError
from lmcore.data.input.options import InputOptions
from lmcore.data.prepare.run import PrepareRequest, join, prepare
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer

IMPORTED_FROM = Path(lmcore.__file__).resolve().parents[1]
SMALL = InputOptions(batch_bytes=2048)


def corpus(folder: Path, files: int = 3, lines: int = 400) -> list[str]:
    """Write files whose documents are all different, some without text."""
    names = []
    for f in range(files):
        path = folder / f"part{f}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for i in range(lines):
                text = "" if i % 97 == 5 else f"document {i} of {f} " * (1 + i % 7)
                file.write(json.dumps({"text": text, "title": f"hello {i}"}) + "\n")
        names.append(str(path))
    return names


def request(names, prefix, **changes) -> PrepareRequest:
    settings = {
        "tokenizer": ByteTokenizer(),
        "json_keys": ("text", "title"),
        "append_eod": True,
        "shard_bytes": 20_000,
        "reading": SMALL,
        **changes,
    }
    return PrepareRequest(tuple(names), str(prefix), **settings)


def outputs(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in {".bin", ".idx", ".json"} and ".prepared" not in path.name
    }


class Stop(Exception):  # noqa: N818  # no error
    """Ends a run from its progress callback."""


def stop_after(documents):
    def progress(state):
        if state.documents >= documents:
            raise Stop

    return progress


@pytest.fixture
def whole(tmp_path):
    """The input, and the files that an undisturbed run makes of it."""
    names = corpus(tmp_path)
    (tmp_path / "whole").mkdir()
    prepare(request(names, tmp_path / "whole/out"))
    made = outputs(tmp_path / "whole")
    assert len(made) == 6
    return names, made


@pytest.mark.parametrize("documents", [260, 410, 799, 1199])
@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_resumed_run_writes_the_bytes_of_an_undisturbed_one(
    tmp_path, whole, hand_made, documents, engine
):
    """Stopped anywhere and continued, even twice, the files match one run."""
    names, made = whole
    tokenizer = ByteTokenizer()
    if engine == "threads":
        tokenizer = hand_made
        (tmp_path / "again").mkdir()
        prepare(request(names, tmp_path / "again/out", tokenizer=tokenizer))
        made = outputs(tmp_path / "again")
    (tmp_path / "cut").mkdir()
    again = request(names, tmp_path / "cut/out", log_interval=1, tokenizer=tokenizer)
    with pytest.raises(Stop):
        prepare(again, stop_after(documents))
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["out.partial"]
    state = json.loads((tmp_path / "cut/out.partial/state.json").read_text())["state"]
    assert 0 < state["documents"] <= documents + 60
    resumed = request(names, tmp_path / "cut/out", resume=True, log_interval=1, tokenizer=tokenizer)
    if documents < 1000:
        with pytest.raises(Stop):
            prepare(resumed, stop_after(documents + 200))
    report = prepare(resumed)
    assert report.documents == 1200
    assert outputs(tmp_path / "cut") == made
    assert not (tmp_path / "cut/out.partial").exists()


def test_only_complete_shards_are_left(tmp_path, whole):
    """Files left after a failure have exactly the bytes of the complete shards."""
    names, _ = whole
    with pytest.raises(Stop):
        prepare(request(names, tmp_path / "cut", log_interval=1), stop_after(500))
    folder = tmp_path / "cut.partial"
    state = json.loads((folder / "state.json").read_text())["state"]
    for number, counts in enumerate(state["keys"]):
        assert (folder / f"{number}.bin").stat().st_size == 2 * counts["tokens"]
        assert (folder / f"{number}.sizes").stat().st_size == 4 * counts["sequences"]
        assert (folder / f"{number}.documents").stat().st_size == 4 * counts["documents"]
    assert not list(folder.glob("*.idx"))


def test_interruption_before_the_first_shard(tmp_path, whole, caplog):
    """Nothing is left of the output, and a warning says so."""

    def interrupt(_):
        raise KeyboardInterrupt

    names, _ = whole
    large = request(names, tmp_path / "cut", log_interval=1, shard_bytes=2**30)
    with pytest.raises(KeyboardInterrupt):
        prepare(large, interrupt)
    assert "nothing is kept" in caplog.text
    assert "--shard-mib" in caplog.text
    assert list(tmp_path.glob("cut*")) == []


def test_killed_process_is_resumed(tmp_path, whole):
    """Killed outright in the middle, with half a shard written, the run continues to the end."""
    names, made = whole
    (tmp_path / "cut").mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from lmcore.data.input.options import InputOptions
        from lmcore.data.prepare.run import PrepareRequest, prepare
        from lmcore.data.tokenizer import ByteTokenizer

        def progress(state):
            if state.documents >= 700:
                os.kill(os.getpid(), signal.SIGKILL)

        prepare(
            PrepareRequest(
                tuple(sys.argv[2:]), sys.argv[1], ByteTokenizer(), ("text", "title"), True,
                shard_bytes=20_000, log_interval=1, reading=InputOptions(batch_bytes=2048),
            ),
            progress,
        )
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cut/out"), *names],
        env={**os.environ, "PYTHONPATH": str(IMPORTED_FROM)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / "cut/out.partial/0.bin").open("ab") as file:
        file.write(b"half a shard")
    with pytest.raises(ConfigError, match="contains an unfinished preparation"):
        prepare(request(names, tmp_path / "cut/out"))
    prepare(request(names, tmp_path / "cut/out", resume=True))
    assert outputs(tmp_path / "cut") == made


def test_killed_worker_names_the_shard_and_is_resumed(tmp_path, monkeypatch, whole):
    """A worker that dies stops the run with the shard; the run continues from the one before."""
    names, made = whole
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "from lmcore.data.tokenizer import ByteTokenizer\n\n\n"
        "class Deadly(ByteTokenizer):\n"
        "    def encode_batch(self, texts):\n"
        f"        armed = os.path.exists({str(tmp_path / 'kill')!r})\n"
        "        if armed and any('300 of 1' in text for text in texts):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().encode_batch(texts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import deadly

    (tmp_path / "kill").touch()
    (tmp_path / "cut").mkdir()
    settings = {"tokenizer": deadly.Deadly(), "workers": 2}
    with pytest.raises(RunError, match=r"died while .*, in shard [2-9]") as caught:
        prepare(request(names, tmp_path / "cut/out", **settings))
    assert "part1.jsonl" in caught.value.why
    (tmp_path / "kill").unlink()
    prepare(request(names, tmp_path / "cut/out", resume=True, **settings))
    assert outputs(tmp_path / "cut") == made


def test_full_disk_keeps_complete_shards_alone(tmp_path, whole, caplog):
    """A disk that fills up in mid-shard is named, and the run can continue with room."""
    names, made = whole
    (tmp_path / "cut").mkdir()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(DataError, match=r"cannot write `.*/out\.partial/[01]\.bin`") as caught,
        ):
            prepare(request(names, tmp_path / "cut/out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "continue with `--resume`" in caplog.text
    assert caught.value.hint == "free disk space and continue with `--resume`"
    prepare(request(names, tmp_path / "cut/out", resume=True))
    assert outputs(tmp_path / "cut") == made


CHANGES = {
    "keys": (
        {"json_keys": ("title", "text")},
        "--json-keys: was `text title`, is `title text`",
    ),
    "eod": ({"append_eod": False}, "--append-eod: was `yes`, is `no`"),
    "format": ({"dataset_impl": "cached"}, "--dataset-impl: was `mmap`, is `cached`"),
    "reading": ({"reading": InputOptions(batch_bytes=1024)}, "batch bytes: was `2048`"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_setting_is_refused_with_the_difference(tmp_path, whole, name):
    """A changed setting that would change the output is refused on resuming, and named."""
    names, _ = whole
    with pytest.raises(Stop):
        prepare(request(names, tmp_path / "cut", log_interval=1), stop_after(500))
    changes, told = CHANGES[name]
    with pytest.raises(ConfigError, match="belongs to a run with other") as caught:
        prepare(request(names, tmp_path / "cut", resume=True, **changes))
    assert told in caught.value.why
    assert (tmp_path / "cut.partial/state.json").exists()


def test_changed_tokenizer_or_input_is_refused(tmp_path, whole, bpe_files):
    """Another vocabulary, and a file that grew, changed or is gone, are all reported at once."""
    names, _ = whole
    with pytest.raises(Stop):
        prepare(request(names, tmp_path / "cut", log_interval=1), stop_after(500))
    with Path(names[0]).open("a") as file:
        file.write('{"text": "more", "title": ""}\n')
    os.utime(names[1])
    other = GPT2BPETokenizer(*map(str, bpe_files))
    with pytest.raises(ConfigError) as caught:
        prepare(request(names[:2], tmp_path / "cut", resume=True, tokenizer=other))
    for told in (
        "tokenizer: was `ByteTokenizer`",
        "fingerprint",
        "was 3 files, is 2\n     input: `",
        "part2.jsonl` is missing",
        "bytes, has",
    ):
        assert told in caught.value.why
    assert "was modified" in caught.value.why


def test_bad_lines_may_be_skipped_on_resuming(tmp_path, caplog):
    """A bad line late in the input costs nothing: the run continues with `--on-error skip`."""
    names = corpus(tmp_path)
    content = Path(names[2]).read_bytes()
    Path(names[2]).write_bytes(content + b"{bad\n" + content)
    with pytest.raises(DataError, match="line 401") as caught:
        prepare(request(names, tmp_path / "out"))
    assert "only `--resume --on-error skip` keeps the complete shards" in str(caught.value.hint)
    assert "continue with `--resume --on-error skip`" in caplog.text
    state = json.loads((tmp_path / "out.partial/state.json").read_text())["state"]
    assert state["file"] == 2
    report = prepare(request(names, tmp_path / "out", resume=True, on_error="skip"))
    assert report.skipped == {"broken JSON": 1}
    assert report.documents == 1600


def test_altered_or_damaged_state_is_refused(tmp_path, whole):
    """A state that cannot be read, and files shorter than it says, are not built on."""
    names, _ = whole
    with pytest.raises(Stop):
        prepare(request(names, tmp_path / "cut", log_interval=1), stop_after(500))
    data = tmp_path / "cut.partial/0.bin"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(DataError, match="expected at least"):
        prepare(request(names, tmp_path / "cut", resume=True))
    data.write_bytes(content)
    (tmp_path / "cut.partial/state.json").write_text('{"version": 1, "state": {}}')
    with pytest.raises(DataError, match="cannot read"):
        prepare(request(names, tmp_path / "cut", resume=True))


def test_two_processes_do_not_write_one_output(tmp_path, whole):
    """While one run writes, another one to the same output is refused with its number."""
    names, _ = whole

    def second(state):
        with pytest.raises(DataError, match="another process writes") as caught:
            prepare(request(names, tmp_path / "out"))
        assert f"process {os.getpid()}" in caught.value.why
        raise Stop

    with pytest.raises(Stop):
        prepare(request(names, tmp_path / "out", log_interval=1), second)


def test_nothing_to_resume_starts_at_the_beginning(tmp_path, whole, caplog):
    """`--resume` without an earlier run is no error, so that a script may always give it."""
    names, made = whole
    (tmp_path / "new").mkdir()
    with caplog.at_level(logging.WARNING):
        prepare(request(names, tmp_path / "new/out", resume=True))
    assert "nothing to resume" in caplog.text
    assert outputs(tmp_path / "new") == made


def test_finished_run_is_not_done_again(tmp_path, whole, caplog):
    """`--resume` after a complete run ends at once, with its report; what differs is done."""
    names, made = whole
    (tmp_path / "new").mkdir()
    prefix = tmp_path / "new/out"
    report = prepare(request(names, prefix, resume=True))

    def again(**changes):
        caplog.clear()
        begun = []
        settings = {"resume": True, "overwrite": True, "log_interval": 1, **changes}
        done = prepare(request(names, prefix, **settings), begun.append)
        return done, bool(begun)

    assert again(workers=2) == (report, False)
    assert "nothing to do" in caplog.text
    os.utime(names[1])
    assert again()[1]
    assert "part1.jsonl`: was modified" in caplog.text
    assert again(append_eod=False)[1]
    assert "--append-eod: was `yes`, is `no`" in caplog.text
    assert again()[1]
    assert not again()[1]
    (tmp_path / "new/out_text_document.bin").unlink()
    assert again()[1]
    assert {name: outputs(tmp_path / "new")[name] for name in made} == made


def test_record_goes_with_the_data_set(tmp_path, whole):
    """A run without `--resume` that replaces a dataset leaves no record of the older one."""
    names, _ = whole
    (tmp_path / "new").mkdir()
    record = tmp_path / "new/out.prepared.json"
    prepare(request(names, tmp_path / "new/out", resume=True))
    assert record.exists()
    for damaged in ('{"version": 1, "files": 3}', "[" * 50_000):  # as if it were not there
        record.write_text(damaged)
        prepare(request(names, tmp_path / "new/out", resume=True, overwrite=True))
        assert record.read_text().startswith('{"version": 1, "identity"')
    prepare(request(names, tmp_path / "new/out", overwrite=True))
    assert not record.exists()


def test_unfinished_run_is_resumed_beside_a_finished_one(tmp_path, whole, caplog):
    """Complete shards of a run over a finished dataset are continued, not taken for finished."""
    names, _ = whole
    prefix = tmp_path / "out"
    prepare(request(names, prefix, resume=True))
    with pytest.raises(Stop):
        prepare(request(names, prefix, overwrite=True, log_interval=1), stop_after(500))
    assert "continue with `--resume --overwrite`" in caplog.text
    with pytest.raises(ConfigError, match="exists already"):
        prepare(request(names, prefix, resume=True))
    told = []
    prepare(request(names, prefix, resume=True, overwrite=True, log_interval=1), told.append)
    assert told
    assert told[0].documents > 200
    assert not (tmp_path / "out.partial").exists()


def test_pipe_cannot_be_resumed(tmp_path):
    """Standard input is refused with `--resume`, beside whatever else is wrong."""
    with pytest.raises(ConfigError, match="a second time") as caught:
        prepare(request(["-", "nowhere.jsonl"], tmp_path / "out", resume=True, workers=0))
    told = [one.what for one in (caught.value, *caught.value.others)]
    assert told == [
        "`--workers 0` must be at least 1",
        "no such file: `nowhere.jsonl`",
        "`--resume` cannot read `-` a second time",
    ]


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_shares_of_hosts_join_to_what_one_host_writes(tmp_path, whole, partitions):
    """Each host's share, joined, gives the same bytes and metadata as one run."""
    names, made = whole
    (tmp_path / "hosts").mkdir()
    prefix = tmp_path / "hosts/out"
    for i in reversed(range(partitions)):
        prepare(request(names, prefix, partitions=partitions, partition=i))
    report = join(request(names, prefix, partitions=partitions))
    assert report.documents == 1200
    joined = outputs(tmp_path / "hosts")
    assert {name: joined[name] for name in made} == made


def test_shares_that_are_missing_or_made_otherwise_are_all_named(tmp_path, whole):
    """Joining says of every share what is wrong with it."""
    names, _ = whole
    prepare(request(names, tmp_path / "out", partitions=3, partition=0, append_eod=False))
    prepare(request(names, tmp_path / "out", partitions=3, partition=2))
    record = tmp_path / "out.2-of-3.json"
    assert record.exists()
    record.write_text("[" * 50_000)
    with pytest.raises(ConfigError) as caught:
        join(request(names, tmp_path / "out", partitions=3))
    told = caught.value.render()
    assert f"cannot read `{record}`" in told
    assert "partition 0 has other input or settings" in told
    assert "--append-eod: was `no`, is `yes`" in told
    assert "partition 1 of 3 is missing" in told


def test_shares_of_other_files_are_named(tmp_path, whole):
    """Joining names files that a share was not made of, and files that have another size."""
    names, _ = whole
    prepare(request(names, tmp_path / "out", partitions=1, partition=0))
    Path(names[1]).write_bytes(Path(names[1]).read_bytes() * 2)
    renamed = Path(names[2]).rename(tmp_path / "renamed.jsonl")
    with pytest.raises(ConfigError, match="partition 0 has other input or settings") as caught:
        join(request([*names[:2], str(renamed)], tmp_path / "out", partitions=1))
    first, second, third = caught.value.why.splitlines()
    assert (first, second) == (
        "input: `part2.jsonl` is missing",
        "     input: `renamed.jsonl` is new",
    )
    assert third.startswith("     `part1.jsonl`: had ")
    renamed.rename(names[2])
    with pytest.raises(ConfigError, match="has other input or settings") as caught:
        join(request(names[::-1], tmp_path / "out", partitions=1))
    assert caught.value.why == "input: the order of the files differs"


def test_shares_are_even_and_none_is_empty(tmp_path):
    """Files are shared by size in their order; more hosts than files is an error."""
    from lmcore.data.input.files import InputFile
    from lmcore.data.prepare.partition import partition_files

    sizes = [10, 10, 10, 970, 10, 10, 10]
    files = []
    for i, size in enumerate(sizes):
        (tmp_path / str(i)).write_bytes(b"x" * size)
        files.append(InputFile(str(tmp_path / str(i)), "jsonl"))
    for partitions in range(1, 8):
        shares = [partition_files(files, i, partitions) for i in range(partitions)]
        assert [file for share in shares for file in share] == files
        assert all(shares)
    # A third of all bytes and two thirds both lie in the large file, which is a share of its own.
    assert [len(partition_files(files, i, 3)) for i in range(3)] == [3, 1, 3]
    with pytest.raises(ConfigError, match="needs at least as many files"):
        partition_files(files, 0, 8)


def test_memory_stays_flat(tmp_path, hand_made):
    """Ten times the input takes no more memory."""
    line = json.dumps({"text": "hello world " * 80}) + "\n"
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pathlib, sys
        from lmcore.data.prepare.run import PrepareRequest, prepare
        from lmcore.data.tokenizer import GPT2BPETokenizer

        tokenizer = GPT2BPETokenizer(*sys.argv[3:])
        prepare(PrepareRequest((sys.argv[1],), sys.argv[2], tokenizer, workers=2))
        status = pathlib.Path("/proc/self/status").read_text()
        print(status.partition("VmHWM:")[2].split()[0])
        """)
    )
    used = []
    for count in (8_000, 80_000):
        source = tmp_path / f"{count}.jsonl"
        source.write_text(line * count)
        command = [sys.executable, str(script), str(source), str(tmp_path / f"out{count}")]
        done = subprocess.run(
            [*command, hand_made.vocab_file, hand_made.merge_file],
            env={**os.environ, "PYTHONPATH": str(IMPORTED_FROM), "OPENBLAS_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.PIPE,
        )
        used.append(int(done.stdout))
    assert used[1] < used[0] + 30_000  # KiB; the second input has 70 MB more
