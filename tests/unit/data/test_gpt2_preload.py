"""GPT-2's two files read in a thread: the tokenizer is the same, and errors are its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lmcore.base.errors import DataError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data import gpt2_preload, native
from lmcore.data.gpt2_preload import BpePreload
from lmcore.data.tokenizer import GPT2BPETokenizer, gpt2, tokenizer_from
from lmcore.data.tokenizer.bpe_files import byte_alphabet


@pytest.fixture
def files(tmp_path):
    """A vocabulary of bytes, one rule and an end, and its rules."""
    tokens = [*byte_alphabet(), "ab", "<|endoftext|>"]
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    merges.write_text("#version: 0.2\na b\n")
    return str(vocabulary), str(merges)


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_tokenizer_is_the_same(files, engine):
    """Ids, size, end and fingerprint match a tokenizer that reads for itself."""
    alone = GPT2BPETokenizer(*files, engine=engine)
    given = GPT2BPETokenizer(*files, engine=engine, preload=BpePreload(*files))
    assert given.engine == alone.engine
    assert (given.vocab_size, given.eod) == (alone.vocab_size, alone.eod) == (258, 257)
    assert given.encode("abba cab") == alone.encode("abba cab")
    assert given.decode([256, 257]) == alone.decode([256, 257]) == "ab<|endoftext|>"
    assert given.fingerprint() == alone.fingerprint()


def test_what_was_read_is_taken(files, tmp_path):
    """The settings' tokenizer has what was read; decoding too looks at nothing else."""
    preload = BpePreload(*files)
    assert preload.contents(*files) is not None
    for file in files:
        (tmp_path / file).write_text("nothing that can be read")
    settings = TokenizerSettings("GPT2BPETokenizer", *files)
    tokenizer = tokenizer_from(settings, preload=preload)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode([256]) == "ab"
    with pytest.raises(DataError, match="is not JSON"):
        tokenizer_from(settings)


def test_other_files_are_not(files, tmp_path):
    """The contents of other files are not used."""
    preload = BpePreload(*files)
    assert preload.contents(files[0], str(tmp_path / "merges2.txt")) is None


def test_a_missing_file_is_the_tokenizers_error(files):
    """A file that cannot be read is named as without the thread."""
    given = files[0], files[1] + "x"
    preload = BpePreload(*given)
    assert preload.contents(*given) is None
    with pytest.raises(DataError, match=r"cannot read .*merges.txtx"):
        GPT2BPETokenizer(*given, preload=preload)


@pytest.mark.parametrize("number,flag", [(0, "vocab.json"), (1, "merges.txt")])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_file_without_end_is_refused(files, tmp_path, monkeypatch, number, flag, threaded):
    """A device is not read, with the thread and without."""
    for module in (gpt2_preload, gpt2):
        monkeypatch.setattr(module, "MAX_BYTES", 1 << 14)
    endless = tmp_path / "endless"
    endless.mkdir()
    (endless / flag).symlink_to("/dev/zero")
    given = list(files)
    given[number] = str(endless / flag)
    preload = BpePreload(*given) if threaded else None
    with pytest.raises(DataError, match=rf"cannot read .*{flag}") as caught:
        GPT2BPETokenizer(*given, preload=preload)
    assert caught.value.why == "it is a device, not a file"


def test_bytes_alone_need_no_rules(tmp_path):
    """A vocabulary of bytes and an empty file of merges make a tokenizer."""
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(json.dumps({token: i for i, token in enumerate(byte_alphabet())}))
    merges.write_text("")
    assert len(GPT2BPETokenizer(str(vocabulary), str(merges)).encode("abc")) == 3


def test_broken_files_are_the_tokenizers_error(files, tmp_path):
    """Files that do not belong together are refused as without the thread."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\na c\n")
    with pytest.raises(DataError, match="needs the token `ac`"):
        GPT2BPETokenizer(*files, preload=BpePreload(*files))


@pytest.mark.skipif(not native.available, reason="needs lmcore._native")
def test_files_are_read_before_numpy_is_there(files):
    """Neither the thread nor the C++ that it calls loads numpy."""
    code = (
        "import sys\n"
        "from lmcore.data.gpt2_preload import BpePreload\n"
        f"contents = BpePreload(*{files!r}).contents(*{files!r})\n"
        "assert contents.native[1:] == (258, 257)\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
