"""Descriptions of other programs' checkpoints: once, and without reading their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checksums import require_late_checksums, require_no_checksums
from megatron_models import GPT, MemoryState, trained
from model_states import BERT, RandomState

from lmcore.base.errors import CheckpointError, LmcoreError
from lmcore.config.section import CheckpointSection, run_options
from lmcore.conversion.foreign_pickle import load as foreign_pickle
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading import foreign_model
from lmcore.conversion.loading.foreign_model import describe_isolated
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.tensors.content import content_of
from lmcore.train.resume.foreign import ForeignModels
from lmcore.train.resume.point import find_resume_point

FORMATS = ("megatron", "megatron-dist")


def written(kind: str, path: Path) -> Path:
    """Write a checkpoint of one kind."""
    path.mkdir()
    if kind == "megatron":
        write_megatron(trained(), path, None, layout=Layout(2), dtype=torch.bfloat16)
    else:
        write_distributed(trained(), path, None)
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_no_checksums_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shape, step and the list of tensors need no more than the indexes of the files."""
    require_no_checksums(written(kind, tmp_path / "in"), monkeypatch)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_weight_is_found_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    """It is described as if it were intact, and no run begins with it."""
    require_late_checksums(written(kind, tmp_path / "in"))


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
