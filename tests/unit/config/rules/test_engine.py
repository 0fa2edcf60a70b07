"""Rules for `--engine`, and for the options that only some engines have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.base.errors import ConfigError, MissingPackageError
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import problems_of, validate


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plugin need not be there for the core's rules to be checked."""
    stand_in_for_deepspeed(monkeypatch)


def found(line: str, world_size: int = 2) -> list[str]:
    loaded = load_config(line.split())
    return [one.what for one in problems_of(loaded, world_size=world_size)]


def test_an_unknown_engine_is_named_alone() -> None:
    """The error lists the engines, and no rule guesses what the unknown one can do."""
    (problem,) = problems_of(load_config(["--engine", "deepsped", "--cpu-offload"]), world_size=2)
    assert problem.what == "`--engine deepsped`: unknown engine"
    assert str(problem.hint).startswith("did you mean `deepspeed`?")
    assert "`lmcore plugins`" in str(problem.hint)


@pytest.mark.usefixtures("installed")
def test_offload_needs_deepspeed() -> None:
    """The native engine has no offload, and its hint does not send a pipeline to DeepSpeed."""
    (problem,) = problems_of(load_config(["--cpu-offload"]), world_size=2)
    assert problem.what == "`--cpu-offload` needs `--engine deepspeed`"
    assert problem.hint == "remove `--cpu-offload`, or use `--engine deepspeed`"
    flags = "--deepspeed --cpu-offload --pipeline-model-parallel-size 2 --global-batch-size 16"
    (problem,) = problems_of(load_config(flags.split()), world_size=2)
    assert problem.hint == "remove `--cpu-offload`"
    assert "DeepSpeed's does not run `--pipeline-model-parallel-size 2` here" in str(problem.why)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--zero-stage 0",
        "--optimizer muon",
    ],
)
def test_megatrons_flag_leaves_the_rest_to_the_native_engine(flags: str) -> None:
    """`--deepspeed` with what DeepSpeed cannot do here is the native engine, and a line says it."""
    loaded = load_config(["--deepspeed", *flags.split(), "--global-batch-size", "16"])
    assert loaded.value("engine") == "native"
    assert loaded.provenance["engine"].kind == "derived"
    (line,) = (line for line in loaded.notices if line.startswith("`--deepspeed`: the native"))
    assert f"DeepSpeed's engine does not run `{flags}` here" in line
    assert not [line for line in loaded.notices if "--engine deepspeed" in line]
    assert problems_of(loaded, world_size=2) == []


@pytest.mark.parametrize("order", [1, -1])
def test_the_native_engine_overrides_megatrons_flag(order: int) -> None:
    """`--engine native` counts beside `--deepspeed`, before or after it."""
    words = [["--engine", "native"], ["--deepspeed"]][::order]
    loaded = load_config([word for pair in words for word in pair])
    assert loaded.value("engine") == "native"
    assert loaded.notices[0] == (
        "1 flag changes nothing here:\n  `--deepspeed`: `--engine native` is given"
    )


@pytest.mark.usefixtures("installed")
def test_megatrons_flag_is_deepspeed_where_it_can() -> None:
    """Data parallelism with ZeRO is DeepSpeed's, as asked."""
    assert load_config(["--deepspeed", "--zero-stage", "2"]).value("engine") == "deepspeed"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--zero-stage {stage}"])
def test_the_native_engine_takes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, layout: str
) -> None:
    """A published file, its disabled sections included, sets the native engine's settings."""
    monkeypatch.chdir(tmp_path)
    off = {"enabled": False}
    content = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "fp16": {**off, "loss_scale": 0},
        "bf16": {"enabled": True},
        **dict.fromkeys(("amp", "autotuning", "curriculum_learning", "elasticity"), off),
        "data_efficiency": {"enabled": True, "data_sampling": off, "data_routing": off},
        "tensor_parallel": {"autotp_size": 1},
        "sequence_parallel_size": 1,
        "sparse_attention": {},
    }
    Path("ds.json").write_text(json.dumps(content))
    argv = f"--engine native --deepspeed-config ds.json {layout.format(stage=stage)}".split()
    loaded = load_config(argv)
    valid = validate(loaded, world_size=4)
    assert valid.loaded.value("micro_batch_size") == 16 // (4 * valid.layout.data)
    assert valid.loaded.provenance["micro_batch_size"].kind == "derived"
    assert valid.layout.zero_stage == stage
    assert str(loaded.provenance["clip_grad"]) == "ds.json: gradient_clipping"
    (notice,) = loaded.notices
    assert "`zero_optimization.overlap_comm`: torch's sharding" in notice
    assert "`steps_per_print`: `--log-interval`" in notice


@pytest.mark.parametrize(
    "section,what",
    [
        ({"offload_param": {"device": "cpu"}}, "offload_param"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"mics_shard_size": 4}, "mics_shard_size"),
    ],
)
def test_what_the_native_engine_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, object], what: str
) -> None:
    """A value that would change memory or numbers is an error with what to do."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"zero_optimization": section}))
    with pytest.raises(ConfigError) as caught:
        load_config(["--deepspeed-config", "ds.json"])
    assert caught.value.what == (
        f"`ds.json: zero_optimization.{what}` is not supported by the native engine"
    )
    assert caught.value.hint


def test_a_missing_plugin_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package that brings the engine, and what needs no package."""
    monkeypatch.setattr("lmcore.model.installation.sources", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    problem, *others = problems_of(load_config(["--engine", "deepspeed"]), world_size=1)
    assert others == []
    assert isinstance(problem, MissingPackageError)
    assert problem.what == (
        "`--engine deepspeed` needs the package `lmcore-deepspeed`, which is not installed"
    )
    assert problem.hint == (
        'run `pip install "lmcore[deepspeed]"`, with the index or folder that lmcore came from, or '
        "use `--engine native`"
    )
    (problem,) = problems_of(load_config(["--deepspeed", "--zero-stage", "2"]), world_size=2)
    assert "`lmcore-deepspeed`" in problem.what
    (problem,) = problems_of(load_config(["--cpu-offload"]), world_size=2)
    assert problem.what == "`--cpu-offload` needs `--engine deepspeed` (of `lmcore[deepspeed]`)"


def test_a_plugin_that_is_off_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose plugin is installed and adds nothing is looked up among the plugins."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    (problem,) = problems_of(load_config(["--engine", "deepspeed"]), world_size=1)
    assert problem.what == "`--engine deepspeed` is not here"
    assert "`lmcore-deepspeed`, is installed" in str(problem.why)
    assert "`lmcore plugins`" in str(problem.hint)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "flags,what",
    [
        ("--tensor-model-parallel-size 2", "`--tensor-model-parallel-size 2`"),
        ("--pipeline-model-parallel-size 2", "`--pipeline-model-parallel-size 2`"),
        ("--context-parallel-size 2", "`--context-parallel-size 2`"),
        ("--zero-stage 0", "`--zero-stage 0`"),
        ("--optimizer muon", "`--optimizer muon`"),
    ],
)
def test_what_does_not_go_with_it_is_named(flags: str, what: str) -> None:
    """Nothing else divides the model."""
    text = found(f"--engine deepspeed {flags}")
    assert f"{what} cannot be combined with `--engine deepspeed`" in text


@pytest.mark.usefixtures("installed")
def test_batch_sizes_of_the_file_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of a step times their samples times processes are the global batch."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,'
        ' "gradient_accumulation_steps": 2}'
    )
    line = "--engine deepspeed --deepspeed-config ds.json"
    assert found(line, world_size=4) == []
    (what,) = found(line, world_size=2)
    assert "which is 16" in what
    assert "`global_batch_size: 32` (ds.json: train_batch_size)" in what


@pytest.mark.usefixtures("installed")
def test_the_batch_follows_from_accumulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a global batch says it by micro-batches and their number."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}'
    )
    loaded = load_config(["--engine", "deepspeed", "--deepspeed-config", "ds.json"])
    plan = resolve(validate(loaded, world_size=2), tokenizer=TokenizerIdentity(vocab_size=257))
    assert plan.global_batch_size == 24
    assert plan.num_micro_batches == 3
