"""Descriptions of other programs' checkpoints: once, and without reading their tensors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from deepspeed_files import Layout as DeepSpeedLayout
from deepspeed_files import write as write_deepspeed_files
from megatron_models import GPT, MemoryState
from model_states import BERT, RandomState

from lmcore.checkpoint import dcp_reader
from lmcore.config.section import CheckpointSection, run_options
from lmcore.conversion.deepspeed.write import write_deepspeed
from lmcore.conversion.foreign_pickle import load as foreign_pickle
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading import foreign_model
from lmcore.conversion.loading.describe import describe, describe_isolated
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import Progress
from lmcore.conversion.tensors.content import content_of
from lmcore.errors import CheckpointError, LmcoreError
from lmcore.model.checkpoint_format import format_of
from lmcore.train.resume.resume_point import find_resume_point
from lmcore.train.resume.saved_settings import ForeignModels

FORMATS = ("megatron", "megatron-dist", "zero 1", "zero 3", "layers", "universal")


def trained() -> MemoryState:
    """Return a model with the state of Adam, at step 7."""
    return MemoryState(GPT, optimizer=True, progress=Progress(7, 70, optimizer_step=6))


def written(kind: str, path: Path) -> Path:
    """Write a checkpoint of one kind."""
    path.mkdir()
    match kind:
        case "megatron":
            write_megatron(trained(), path, None, layout=Layout(2), dtype=torch.bfloat16)
        case "megatron-dist":
            write_distributed(trained(), path, None)
        case "universal":
            write_deepspeed(trained(), path, None)
        case "layers":
            write_deepspeed_files(trained(), path, DeepSpeedLayout(1, 1))
        case _:
            write_deepspeed_files(trained(), path, DeepSpeedLayout(zero=int(kind[-1]), data=2))
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_no_checksums_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shape, step and the list of tensors need no more than the indexes of the files."""
    path = written(kind, tmp_path / "in")
    name = format_of(path)
    assert name is not None

    compared: list[str] = []

    def compare(archive: zipfile.ZipFile) -> None:
        # Files of settings alone are small, and are compared.
        records = [one for one in archive.infolist() if "/data/" in one.filename]
        compared.extend(one.filename for one in records if one.file_size > 50)

    for module in (foreign_pickle, dcp_reader):
        monkeypatch.setattr(module, "damaged_record", compare)
    found = describe(str(path), name)
    assert found["shape"] == GPT.to_dict()
    assert found["iteration"] == (None if kind == "layers" else 7)
    content = content_of(path)
    assert len(content.tensors) == len(trained().parameters) * (1 if kind == "layers" else 3)
    assert not compared
    read = content_of(path, verify=True)
    for stored in read.tensors:
        read.read(stored)
    assert compared


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_weight_is_found_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    """It is described as if it were intact, and no run begins with it."""
    path = written(kind, tmp_path / "in")
    weight, damaged = trained().read("final_norm.weight")[:8], 0  # ZeRO-3's share of two ranks
    marked = weight.numpy().tobytes()
    half = weight.bfloat16().view(torch.uint8).numpy().tobytes()
    for file in (file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for values in (marked, half):
            if (place := content.find(values)) >= 0:
                content = content[:place] + bytes([values[0] ^ 1]) + content[place + 1 :]
                damaged += 1
        file.write_bytes(content)
    assert damaged
    name = format_of(path)
    assert name is not None
    assert "error" not in describe(str(path), name)
    with pytest.raises(CheckpointError, match=r"is damaged|is not stored") as caught:
        WeightReader(path).read("final_norm.weight")
    assert "checksum" in str(caught.value.why)


def test_pickled_weights_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of the tensors compares no checksums; reading them does."""
    write_huggingface(MemoryState(GPT), tmp_path, None)
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr(foreign_pickle, "damaged_record", lambda _archive: "data/0")
    assert content_of(tmp_path).tensors
    with pytest.raises(CheckpointError, match="is damaged"):
        content_of(tmp_path, verify=True)


def test_one_description_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a run and its starting point are of the same description."""
    path = written("megatron", tmp_path / "in")
    calls = []
    original = foreign_model.describe_isolated

    def counted(*arguments: object) -> dict[str, object]:
        calls.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(foreign_model, "describe_isolated", counted)
    models = ForeignModels()
    settings = models.settings(path)
    start = find_resume_point(CheckpointSection(load=str(path), finetune=True), foreign=models)
    assert settings is not None
    assert start is not None
    rows = start.manifest.model_shape["padded_vocab_size"]
    assert settings.config["model"]["make_vocab_size_divisible_by"] == rows
    assert len(calls) == 1
    assert models.settings(tmp_path / "absent") is None


def test_the_kind_of_an_error(tmp_path: Path) -> None:
    """A wrong argument and a damaged file keep their exit status behind another process."""
    with pytest.raises(CheckpointError, match="has no checkpoint of Megatron") as caught:
        describe_isolated(tmp_path, "megatron")
    assert caught.value.exit_status == 2
    path = written("megatron", tmp_path / "in")
    next(path.rglob("model_optim_rng.pt")).write_text("no weights")
    with pytest.raises(CheckpointError, match="is not a file of") as caught:
        describe_isolated(path, "megatron")
    assert caught.value.exit_status == 1


def test_settings_of_a_family(tmp_path: Path) -> None:
    """A run with another program's BERT has the settings of the section `bert` from it."""
    write_huggingface(RandomState(BERT), tmp_path, None)
    settings = ForeignModels().settings(tmp_path)
    assert settings is not None
    problems: list[LmcoreError] = []
    found = {name: one[0] for name, one in settings.model_layer(run_options(), problems).items()}
    assert not problems
    assert found["model_family"] == "bert"
    assert found["bert_gelu"] == "erf"
    assert found["bert_post_norm"] is True
