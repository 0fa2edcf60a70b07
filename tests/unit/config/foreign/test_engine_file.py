"""DeepSpeed's file: its settings become the run's, or say why they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.engine_file import read_engine_file, value_at
from lmcore.config.load import load_config
from lmcore.config.settings import LoadedConfig

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads settings with a file `ds.json` of the given content."""
    monkeypatch.chdir(tmp_path)
    stand_in_for_deepspeed(monkeypatch)

    def go(content: Any, flags: str = "", *, yaml: str = "") -> LoadedConfig:
        text = content if isinstance(content, str) else json.dumps(content)
        Path("ds.json").write_text(text, encoding="utf-8")
        argv = ["--engine", "deepspeed", "--deepspeed-config", "ds.json", *flags.split()]
        if yaml:
            Path("run.yaml").write_text(yaml, encoding="utf-8")
            argv.insert(0, "run.yaml")
        return load_config(argv)

    return go


def problems(load: Load, content: Any, flags: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(content, flags)
    return [one.what for one in (caught.value, *caught.value.others)]


@pytest.mark.parametrize(
    "content,option,value",
    [
        ({"train_batch_size": 32}, "global_batch_size", 32),
        ({"train_micro_batch_size_per_gpu": 2}, "micro_batch_size", 2),
        ({"gradient_clipping": 0.5}, "clip_grad", 0.5),
        ({"zero_optimization": {"stage": 2}}, "zero_stage", 2),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "cpu_offload", True),
        ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "cpu_offload", False),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload", True),
        ({"bf16": {"enabled": True}}, "precision", "bf16"),
        ({"bfloat16": {"enabled": True}}, "precision", "bf16"),
        ({"fp16": {"enabled": True}}, "precision", "fp16"),
        ({"fp16": {"enabled": True, "loss_scale": 1024}}, "loss_scale", 1024.0),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "initial_loss_scale", 4096.0),
        ({"fp16": {"enabled": True, "loss_scale_window": 500}}, "loss_scale_window", 500),
        ({"fp16": {"enabled": True, "hysteresis": 3}}, "hysteresis", 3),
        ({"fp16": {"enabled": True, "min_loss_scale": 2}}, "min_loss_scale", 2.0),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "sgd_momentum", 0.5),
        ({"optimizer": {"type": "SGD"}}, "optimizer", "sgd"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}, "lr", 3e-4),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95]}}}, "adam_beta1", 0.8),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95]}}}, "adam_beta2", 0.95),
        ({"optimizer": {"params": {"eps": 1e-6}}}, "adam_eps", 1e-6),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, "weight_decay", 0.1),
    ],
)
def test_it_sets_options(load: Load, content: Any, option: str, value: Any) -> None:
    """A value of the file sets the option, with the file as its provenance."""
    loaded = load(content)
    assert loaded.value(option) == value
    assert str(loaded.provenance[option]).startswith("ds.json: ")
    assert loaded.notices == ()


def test_auto_leaves_the_value_to_us(load: Load) -> None:
    """A value that is "auto" comes from flags or defaults, and contradicts nothing."""
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    loaded = load(content, "--global-batch-size 24 --precision bf16 --lr 1e-4")
    assert loaded.value("global_batch_size") == 24
    assert loaded.value("clip_grad") == 1.0
    assert loaded.value("precision") == "bf16"
    assert loaded.value("lr") == 1e-4


def test_equal_values_do_not_contradict(load: Load) -> None:
    """A setting may have equal values in both places, also in different notations."""
    content = {"fp16": {"enabled": True, "initial_scale_power": 12}, "train_batch_size": 16}
    loaded = load(content, "--initial-loss-scale 4096 --global-batch-size 16 --precision fp16")
    assert loaded.value("initial_loss_scale") == 4096.0


def test_different_values_are_named_both(load: Load) -> None:
    """Every contradiction is reported, with both values and their places."""
    content = {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": False},
        "optimizer": {"params": {"lr": 1e-3}},
    }
    yaml = "optimizer:\n  lr: 0.0001\n"
    with pytest.raises(ConfigError) as caught:
        load(content, "--global-batch-size 16 --zero-stage 3 --precision bf16", yaml=yaml)
    found = [one.what for one in (caught.value, *caught.value.others)]
    end = "contradict each other"
    assert found == [
        f"`--global-batch-size 16` and `ds.json: train_batch_size: 32` {end}",
        f"`--zero-stage 3` and `ds.json: zero_optimization.stage: 1` {end}",
        f"`run.yaml:2: lr: 0.0001` and `ds.json: optimizer.params.lr: 0.001` {end}",
        f"`--precision bf16` and `ds.json: bf16.enabled: false` {end}",
    ]


def test_a_preset_gives_way(load: Load) -> None:
    """The file counts more than a preset, as every file does."""
    loaded = load({"gradient_clipping": 0.25}, "--preset gpt2-124m")
    assert loaded.value("clip_grad") == 0.25


def test_the_runs_own_file_repeats_it(load: Load) -> None:
    """A `config.yaml` with all settings agrees with the file that they were taken from."""
    yaml = "training:\n  global_batch_size: 32\nparallel:\n  deepspeed_config: ds.json\n"
    assert load({"train_batch_size": 32}, yaml=yaml).value("global_batch_size") == 32


@pytest.mark.parametrize(
    "text,what",
    [
        ("{", "`ds.json` is not JSON"),
        ("", "`ds.json` is not JSON"),
        ('{"a": 1, "a": 2}', "`ds.json` is not JSON"),
        ('{"gradient_clipping": NaN}', "`ds.json` is not JSON"),
        ("[" * 100_000, "`ds.json` is not JSON"),
        ("[1]", "`ds.json` is not a JSON object"),
        ("x" * (2 << 20), "cannot read DeepSpeed's file `ds.json`"),
        (
            '{"train_batch_size": "many"}',
            '`ds.json: train_batch_size: "many"`: `many` is no integer',
        ),
        ('{"zero_optimization": true}', "`ds.json: zero_optimization` is not a JSON object"),
        (
            '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
            "`ds.json` enables `fp16` and `bf16`",
        ),
        ('{"scheduler": {"type": "WarmupLR"}}', "`ds.json: scheduler` is not supported by lmcore"),
        (
            '{"optimizer": {"type": "OneBitAdam"}}',
            '`ds.json: optimizer.type: "OneBitAdam"` is not an optimizer of this engine',
        ),
        (
            '{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}',
            "`ds.json: optimizer.params.adam_w_mode` is false",
        ),
        (
            '{"optimizer": {"params": {"betas": 0.9}}}',
            "`ds.json: optimizer.params.betas` is not a list of two numbers",
        ),
        (
            '{"zero_optimization": {"offload_param": {"device": "nvme"}}}',
            "`ds.json: zero_optimization.offload_param.device` is `nvme`",
        ),
        (
            '{"zero_optimization": {"compute_grad_norm": false}}',
            "`ds.json: zero_optimization.compute_grad_norm` is false",
        ),
        (
            '{"fp16": {"enabled": true, "initial_scale_power": 4096}}',
            "`ds.json: fp16.initial_scale_power: 4096` is out of range",
        ),
        (
            '{"gradient_accumulation_steps": 0}',
            "`ds.json: gradient_accumulation_steps: 0` is not a number of micro-batches",
        ),
    ],
)
def test_bad_files_are_refused(load: Load, text: str, what: str) -> None:
    """Each problem of the file is reported once."""
    found = problems(load, text)
    assert len(found) == 1
    assert found[0].startswith(what.partition("`: `")[0])


def test_a_scheduler_of_the_file(load: Load) -> None:
    """The hint has its settings as flags, if it is one of lmcore's schedules."""
    params = {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "total_num_steps": "auto"}
    expected = {
        "WarmupLR": "give `--lr-decay-style constant --lr 0.1 --lr-warmup-iters 5`",
        "WarmupDecayLR": "give `--lr-decay-style linear --lr 0.1 --lr-warmup-iters 5`",
        "WarmupCosineLR": "give `--lr-decay-style cosine --lr 0.1 --lr-warmup-iters 5`",
        "OneCycle": "choose another schedule by `--lr-decay-style`",
    }
    for kind, hint in expected.items():
        with pytest.raises(ConfigError) as caught:
            load({"scheduler": {"type": kind, "params": params}})
        assert caught.value.hint == f"delete `scheduler` from the file, and {hint}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that leads nowhere is an error with the option's name in its hint."""
    with pytest.raises(ConfigError, match="cannot read DeepSpeed's file") as caught:
        read_engine_file(str(tmp_path / "no.json"))
    assert caught.value.why == "No such file or directory"
    assert "--deepspeed-config" in str(caught.value.hint)


def test_unknown_keys_are_reported(load: Load) -> None:
    """A key that nobody knows is a notice with the nearest one; idle sections say why."""
    content = {"gradient_cliping": 1.0, "steps_per_print": 5, "checkpoint": {}, "xyz": 1}
    meant = "did you mean `gradient_clipping`?"
    assert load(content).notices == (
        f"ds.json: `gradient_cliping` is not a known setting of DeepSpeed; {meant}",
        "ds.json: `checkpoint` changes nothing: lmcore writes the checkpoints",
        "ds.json: `xyz` is not a known setting of DeepSpeed",
    )


def test_accumulation_is_kept_beside_the_settings(load: Load) -> None:
    """The number of micro-batches is no setting of ours: batch sizes follow from it."""
    assert load({"gradient_accumulation_steps": 4}).accumulation_steps == 4
    assert load({"gradient_accumulation_steps": "auto"}).accumulation_steps is None


def test_values_are_found_by_their_path() -> None:
    """A path that ends early, or at "auto", leads to nothing."""
    content = {"a": {"b": 1, "c": "auto"}, "d": 2}
    assert value_at(content, "a.b") == 1
    assert value_at(content, "a.c") is None
    assert value_at(content, "d.e") is None
    assert value_at(content, "x.y.z") is None
