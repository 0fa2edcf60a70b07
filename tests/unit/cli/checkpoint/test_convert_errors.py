"""Errors of `lmcore checkpoint convert`: each has a hint, and wrong arguments have status 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed_plugin import with_deepspeed
from model_states import GPT2, RandomState

from lmcore.cli.main import main
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.model.checkpoint_format import formats

Convert = Callable[..., str]
FORMATS = tuple(dict.fromkeys([*formats(), "megatron-deepspeed"]))


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_huggingface(RandomState(replace(GPT2, ffn_hidden_size=24)), directory, None)
    return directory


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Function that returns the message of a conversion that is refused with status 2."""

    def convert(source: Path, *words: str, target: Path | None = None) -> str:
        out = target or tmp_path / "out"
        assert main(["checkpoint", "convert", str(source), str(out), *words]) == 2
        assert not (tmp_path / "out").exists()
        said = capsys.readouterr().err
        assert "\nwhy: " in said or "no such directory" in said or "is a file" in said
        assert "\nhint: " in said
        return said

    return convert


@pytest.mark.parametrize("source_format", [*FORMATS, None])
def test_sources_that_are_no_checkpoint(
    source_format: str | None, refusal: Convert, tmp_path: Path
) -> None:
    """A path that does not exist, a file and an empty directory are explained in every format."""
    words = ["--to", "huggingface"]
    words += ["--source-format", source_format] if source_format else []
    words += ["--ckpt-step", "7"] if source_format in {"megatron", None} else []
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert "no such directory" in refusal(tmp_path / "nothing", *words)
    assert "is a file, not a checkpoint" in refusal(tmp_path / "file", *words)
    assert f"{tmp_path / 'empty'}" in refusal(tmp_path / "empty", *words)


@pytest.mark.parametrize("written", [name for name in FORMATS if name != "huggingface"])
def test_a_source_of_another_format(
    model: Path, written: str, refusal: Convert, tmp_path: Path
) -> None:
    """Its format is named; a format reads a source only if it finds its own files there."""
    there = tmp_path / "there"
    assert main(["checkpoint", "convert", str(model), str(there), "--to", written]) == 0
    for name in FORMATS:
        if name == written:
            continue
        said = refusal(there, "--to", "lmcore", "--source-format", name)
        assert f"has no checkpoint of the format `{name}`" in said
        assert f"its files are of the format `{written}`" in said


def test_names_of_another_format(model: Path, refusal: Convert) -> None:
    """The format's own names are listed."""
    said = refusal(model, "--to", "megatron-deepspeed", "--megatron-names", "core")
    assert "`--to megatron-deepspeed` does not have the names `core`" in said
    assert "its names are `pipeline` or `legacy`" in said
    for to in ("megatron", "megatron-dist"):
        said = refusal(model, "--to", to, "--megatron-names", "pipeline")
        assert "its names are `core` or `core-local` or `legacy`" in said


@pytest.mark.parametrize("to", ["megatron", "megatron-dist", "megatron-deepspeed"])
def test_layouts_that_do_not_divide_the_model(to: str, model: Path, refusal: Convert) -> None:
    """The possible sizes are listed: GPT-2 here has 3 heads, 2 layers and 24 channels."""
    said = refusal(model, "--to", to, "--tensor-model-parallel-size", "2")
    assert "`--tensor-model-parallel-size` can be 1 or 3" in said
    said = refusal(model, "--to", to, "--pipeline-model-parallel-size", "3")
    assert "`--pipeline-model-parallel-size`, multiplied" in said
    assert "can be 1 or 2" in said


@pytest.mark.parametrize(
    "words, hint",
    [
        (
            ["--megatron-names", "legacy", "--pipeline-model-parallel-size", "2"],
            "leave `--megatron-names` or `--pipeline-model-parallel-size` out",
        ),
        (
            ["--num-virtual-stages-per-pipeline-rank", "2"],
            "leave `--num-virtual-stages-per-pipeline-rank` out",
        ),
    ],
)
def test_layouts_that_deepspeed_does_not_have(
    words: list[str], hint: str, model: Path, refusal: Convert
) -> None:
    assert hint in refusal(model, "--to", "megatron-deepspeed", *words)


def test_a_target_below_a_file(model: Path, refusal: Convert, tmp_path: Path) -> None:
    """The file is named."""
    file = tmp_path / "file"
    file.touch()
    for target in (file / "out", file / "deep" / "out"):
        said = refusal(model, "--to", "lmcore", target=target)
        assert f"`{target}` cannot be made" in said
        assert f"`{file}` is no directory" in said


def test_a_tracker_that_names_a_missing_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The missing directory is named, and one that is there."""
    there = tmp_path / "there"
    assert main(["checkpoint", "convert", str(model), str(there), "--to", "megatron"]) == 0
    (there / "latest_checkpointed_iteration.txt").write_text("12")
    for words in ([], ["--source-format", "megatron"]):
        command = ["checkpoint", "convert", str(there), str(tmp_path / "out"), "--to", "lmcore"]
        assert main([*command, *words]) == 1
        said = capsys.readouterr().err
        assert "names `iter_0000012`, which has no files of Megatron" in said
        assert f"such as `{there / 'release'}`" in said
