"""Each field that a reader reads, with a value of each JSON type: read or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_values import NOT_JSON, VALUES, accept_or_refuse, places
from megatron_files import run_progress
from model_states import GPT2, LLAMA, RandomState

from lmcore.base.errors import LmcoreError
from lmcore.checkpoint.manifest import _checksum
from lmcore.conversion.formats import read_state
from lmcore.conversion.huggingface import read as saved_config
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.loading.checkpoint_tokenizer import tokenizer_of
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.run.saved_arguments import (
    read_model,
    saved_layout,
    saved_precision,
)
from lmcore.conversion.megatron.run.schedule import read_schedule
from lmcore.conversion.native.continuing import continue_flags, continue_notes, longer_flag
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.model.shape import ModelShape


class Recorded(dict[str, Any]):
    """Mapping that notes which names are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def with_value(content: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a place."""
    changed = owner = copy.deepcopy(content)
    for key in keys[:-1]:
        owner = owner[key]
    owner[keys[-1]] = value
    return changed


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_configuration_of_a_model(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config.json`, with the settings of rotary positions in either spelling."""
    write_huggingface(RandomState(shape), tmp_path, None)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    recorded = Recorded(config)
    with monkeypatch.context() as patch:
        patch.setattr(saved_config.json, "loads", lambda _text: recorded)
        saved_config.read_config(tmp_path)
    assert {"model_type", "vocab_size", "tie_word_embeddings"} < recorded.read
    rope = ("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "partial_rotary_factor")
    for value in (*VALUES, *NOT_JSON):
        changed = [{name: value} for name in sorted(recorded.read)]
        changed += [{"rope_parameters": {"rope_type": "llama3"} | {name: value}} for name in rope]
        for one in [*changed, value]:
            path.write_text(json.dumps(config | one if isinstance(one, dict) else one))
            accept_or_refuse(lambda: HuggingFaceState(tmp_path), one)
    path.write_text('{"model_type": []}')
    with pytest.raises(LmcoreError, match=r"no model of type `\[\]`"):
        saved_config.read_config(tmp_path)


def test_index_and_configuration_of_a_tokenizer(tmp_path: Path) -> None:
    """A name that no file can have is damage, too."""
    write_huggingface(RandomState(LLAMA), tmp_path, None, largest_file=20_000)
    index, settings = tmp_path / "model.safetensors.index.json", tmp_path / "tokenizer_config.json"
    (tmp_path / "tokenizer.model").touch()
    for value in (*VALUES, *NOT_JSON, "\ud800", "\0", "x" * 5000):
        for one in (value, {"weight_map": value}, {"weight_map": {"a": value}}):
            index.write_text(json.dumps(one))
            accept_or_refuse(lambda: HuggingFaceState(tmp_path), one)
        for one in (value, {"add_bos_token": value}):
            settings.write_text(json.dumps(one))
            accept_or_refuse(lambda: tokenizer_settings(tmp_path), one)


def test_manifest(tmp_path: Path) -> None:
    """A manifest with a right checksum, and a run that it records."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    state.progress = run_progress(loss_scale={"value": 1.0})
    write_lmcore(state, tmp_path, ByteTokenizer())
    (path,) = tmp_path.glob("checkpoints/iter_*/manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["manifest_sha256"]
    known = [keys for keys in places(manifest, 5) if keys[0] not in {"tensors", "files"}]
    known += [(name, next(iter(manifest[name]))) for name in ("tensors", "files")]

    def use() -> None:
        found = read_state(tmp_path)
        tokenizer_of(found)
        continue_flags(found)
        continue_notes(found)
        longer_flag(found)

    for number, keys in enumerate(known):
        # Neighbours have other values, so that each type is in many fields.
        for value in VALUES if keys[-1] in {"optimizer", "adam_eps"} else VALUES[number % 6 :: 6]:
            changed = with_value(manifest, keys, value)
            changed["manifest_sha256"] = _checksum(changed)
            path.write_text(json.dumps(changed))
            accept_or_refuse(use, (keys, value))


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_arguments_of_megatron(shape: ModelShape, tmp_path: Path) -> None:
    write_megatron(RandomState(shape), tmp_path, None)
    (path,) = tmp_path.glob("*/*/*.pt")
    content = torch.load(path, weights_only=False)
    recorded = Recorded(vars(content["args"]))
    rows = shape.padded_vocab_size

    def use(args: dict[str, Any]) -> None:
        read_model(args, tmp_path, rows)
        saved_layout(args)
        saved_precision(args)
        read_schedule(content, args)

    use(recorded)
    assert len(recorded.read) > 50
    for name in sorted(recorded.read):
        for value in (*VALUES, *NOT_JSON):
            args = {**vars(content["args"]), name: value}
            accept_or_refuse(use, (name, value), args)
    for name in (*content, "opt_param_scheduler", "optimizer", "lr_scheduler"):
        for value in VALUES:
            torch.save({**content, name: value}, path)
            accept_or_refuse(lambda: read_state(tmp_path), (name, value))


def test_schedule_of_megatron() -> None:
    saved = {"max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 1, "lr_decay_steps": 10}
    saved |= {"lr_decay_style": "cosine", "num_steps": 3}
    args = {"lr_wsd_decay_style": "minus_sqrt", "lr_wsd_decay_samples": 3}
    assert read_schedule({"opt_param_scheduler": saved}, args).values is not None
    for value in (*VALUES, *NOT_JSON):
        for style in ("cosine", "WSD"):
            for name in saved:
                content = {"opt_param_scheduler": saved | {"lr_decay_style": style, name: value}}
                accept_or_refuse(read_schedule, (name, value), content, args)
            content = {"opt_param_scheduler": saved | {"lr_decay_style": style}}
            for name in (*args, "lr_wsd_decay_iters", "global_batch_size"):
                accept_or_refuse(read_schedule, (name, value), content, args | {name: value})
