"""Conversions as a whole: the new directory is complete or absent, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_states import GPT2, LLAMA, RandomState, same_state

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import read_manifest, save_checkpoint
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion import new_directory as module
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import WriteOptions, read_state
from lmcore.conversion.loading.foreign_model import describe_foreign
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import ADAM, WEIGHT, ModelState
from lmcore.model.checkpoint_format import format_of, formats

RunOf = Callable[[ModelState], Path]


def test_there_and_back(tmp_path: Path, run_of: RunOf) -> None:
    state = RandomState(LLAMA)
    run = run_of(state)
    assert format_of(run) == "lmcore"
    done = convert(run, tmp_path / "hf", "huggingface")
    assert (done.source, done.target, done.optimizer) == ("lmcore", "Hugging Face", False)
    assert format_of(tmp_path / "hf") == "huggingface"
    convert(tmp_path / "hf", tmp_path / "deep/er/back", "lmcore")
    back = LmcoreState(tmp_path / "deep/er/back")
    assert back.vocab_size == 257
    same_state(back, state)
    tokenizer = back.manifest.meta["tokenizer"]
    assert isinstance(tokenizer, dict)
    assert tokenizer["describe"]["type"] == "HuggingFaceTokenizer"
    assert (tmp_path / "deep/er/back/tokenizer/pretrained/tokenizer.json").is_file()


@pytest.mark.parametrize("name", [name for name in formats() if name != "lmcore"])
@pytest.mark.parametrize("state", [RandomState(GPT2), RandomState(LLAMA)], ids=["gpt2", "llama"])
def test_every_format_there_and_back(
    tmp_path: Path, run_of: RunOf, name: str, state: RandomState
) -> None:
    """The weights are the same, and the shape is known before torch is loaded."""
    convert(run_of(state), tmp_path / "there", name)
    assert format_of(tmp_path / "there") == name
    found = describe_foreign(tmp_path / "there")
    assert found is not None
    assert replace(found.shape, padded_vocab_size=384) == state.shape
    convert(
        tmp_path / "there", tmp_path / "back", "lmcore", choice=TokenizerSettings("ByteTokenizer")
    )
    same_state(LmcoreState(tmp_path / "back"), state)


def test_the_optimizer_comes_along(tmp_path: Path, run_of: RunOf) -> None:
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    run = run_of(state)
    found = LmcoreState(run)
    assert found.kinds == (WEIGHT, *ADAM)
    assert found.progress == state.progress
    for (name, kind), tensor in state.tensors.items():
        assert torch.equal(found.read(name, kind), tensor)
    done = convert(run, tmp_path / "again", "lmcore")
    assert done.optimizer
    again = LmcoreState(tmp_path / "again")
    assert again.progress == state.progress
    assert read_manifest(again.checkpoint).tensors == found.manifest.tensors


def test_nothing_is_replaced(tmp_path: Path, run_of: RunOf) -> None:
    run = run_of(RandomState(GPT2))
    target = tmp_path / "there"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(run, target, "huggingface")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(run, tmp_path / "link", "huggingface")
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_damage_and_a_full_disk_leave_nothing(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(RandomState(GPT2))
    out = tmp_path / "out"
    out.mkdir()

    def full(*_arguments: object, **_options: object) -> list[str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("lmcore.conversion.huggingface.write.write_huggingface", full)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            convert(run, out / "hf", "huggingface")
        assert "bytes" in str(caught.value.why)
    with monkeypatch.context() as patch:
        patch.setattr("lmcore.checkpoint.dcp_writer.write_streamed", full)
        with pytest.raises(CheckpointError, match=re.escape(f"write `{out / 'again'}`")) as caught:
            convert(run, out / "again", "lmcore")
        assert "No space left" in str(caught.value.why)
        assert "--keep-last" not in str(caught.value.hint)
    with monkeypatch.context() as patch:
        usage = module.shutil.disk_usage(tmp_path)
        patch.setattr(module.shutil, "disk_usage", lambda _path: usage._replace(free=10))
        with pytest.raises(CheckpointError, match="10 are free there"):
            convert(run, out / "hf", "huggingface")
    (shard,) = run.glob("checkpoints/*/__0_0.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="every one there is damaged"):
        convert(run, out / "hf", "huggingface")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_copy_that_a_full_disk_refuses(number: int, tmp_path: Path) -> None:
    """`shutil` names the file that is copied in its error, and that can be read."""
    with (
        pytest.raises(CheckpointError, match="cannot write") as caught,
        module.new_directory(tmp_path / "out") as directory,
    ):
        raise OSError(number, os.strerror(number), "merges.txt", None, str(directory / "merges"))
    assert os.strerror(number) in str(caught.value.why)
    assert str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["huggingface", "lmcore", "megatron"])
def test_a_source_that_cannot_be_read(
    to: str, tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file of the source, and says nothing of writing."""
    convert(run_of(RandomState(GPT2)), tmp_path / "in", "megatron-dist")
    checkpoint = tmp_path / "in/release"
    monkeypatch.setattr("lmcore.conversion.convert.read_state", unreadable(checkpoint))
    with pytest.raises(CheckpointError, match="cannot read") as caught:
        convert(tmp_path / "in", tmp_path / "out", to)
    assert str(checkpoint / "__") in caught.value.what
    assert caught.value.why == "No such file or directory"
    assert not (tmp_path / "out").exists()


def unreadable(checkpoint: Path) -> Callable[..., ModelState]:
    """Return a function that opens a checkpoint and removes the files of its tensors."""

    def read(*arguments: Any, **options: Any) -> ModelState:
        state = read_state(*arguments, **options)
        for path in checkpoint.glob("*.distcp"):
            path.unlink()
        return state

    return read


def test_files_beside_that_cannot_be_read(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the file system that names a file elsewhere is one of reading."""
    run = run_of(RandomState(GPT2))

    def absent(*_arguments: object, **_options: object) -> list[str]:
        (tmp_path / "absent").read_bytes()
        raise AssertionError

    monkeypatch.setattr("lmcore.conversion.huggingface.write.write_huggingface", absent)
    with pytest.raises(CheckpointError, match=re.escape(f"cannot read `{tmp_path / 'absent'}`")):
        convert(run, tmp_path / "out", "huggingface")


def test_a_save_that_is_refused(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the target, not the hidden directory, and no flag of `lmcore train`."""
    run = run_of(RandomState(GPT2))

    def refused(*_arguments: object, **_options: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("lmcore.checkpoint.dcp_writer.write_streamed", refused)
    with pytest.raises(CheckpointError) as caught:
        convert(run, tmp_path / "out", "lmcore")
    assert caught.value.what == f"cannot write `{tmp_path / 'out'}`"
    assert caught.value.why == "Permission denied"
    assert "--save" not in str(caught.value.hint)


def test_a_directory_of_no_format(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is empty; looked for the files of"):
        read_state(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        read_state(tmp_path / "absent")
    save_checkpoint(tmp_path / "x/checkpoints", 1, {"w": torch.ones(2)}, {}, model_shape={})
    with pytest.raises(CheckpointError, match="cannot be built"):
        read_state(tmp_path / "x")


@pytest.mark.parametrize("name", [name for name in formats() if name != "lmcore"])
def test_values_too_large_for_a_dtype(tmp_path: Path, run_of: RunOf, name: str) -> None:
    """They would become infinite: an error, and nothing is written."""
    state = RandomState(LLAMA)
    state.tensors["final_norm.weight", WEIGHT][3] = 1e5
    run = run_of(state)
    half = WriteOptions(dtype=torch.float16)
    with pytest.raises(CheckpointError, match="1 of its values are too large") as caught:
        convert(run, tmp_path / "out", name, options=half)
    assert "norm" in caught.value.what
    assert not (tmp_path / "out").exists()
    convert(run, tmp_path / "out", name, options=WriteOptions(dtype=torch.bfloat16))


@pytest.mark.parametrize("to", ["lmcore", "megatron", "huggingface"])
def test_space_for_the_state_of_the_optimizer(
    to: str, tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is part of what a conversion needs at least, if the format has it; nothing is written."""
    state = RandomState(GPT2, kinds=(WEIGHT, *ADAM))
    run = run_of(state)
    weights = 4 * sum(state.tensors[name, WEIGHT].numel() for name in state.parameters)
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _path: usage._replace(free=weights))
    if to == "huggingface":
        convert(run, tmp_path / "out", to)
        return
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        convert(run, tmp_path / "out", to)
    assert f"it needs at least {3 * weights:,} bytes" in str(caught.value.why)
    assert not (tmp_path / "out").exists()
