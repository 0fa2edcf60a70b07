"""Flags of training runs and of Megatron's scripts for `lmcore generate`."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.generate import GivenModel, generate_flags, serve_flags
from lmcore.config.options.flags import ParsedFlags, parse_flags

SHAPE = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_query_groups": 1,
    "head_dim": 8,
    "rope_scaling_factor": 8.0,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "model_family": "",
}


def parsed(text: str) -> tuple[ParsedFlags, GivenModel]:
    """Return the result of some flags, none from the command itself."""
    model = GivenModel()
    return parse_flags(text.split(), {}, foreign=generate_flags((), model)), model


@pytest.mark.parametrize(
    "text",
    [
        "--num-layers 2 --hidden-size 24 --kv-channels 8 --num-layers 2",
        "--group-query-attention",
        "--group-query-attention --num-query-groups 1",
        "--num-query-groups 4",  # without effect in training too
        "--use-rope-scaling --rope-scaling-factor 8",
        "--disable-bias-linear --use-rotary-position-embeddings",
        "--no-group-query-attention",
        "--model-family gpt",
        "--model-family Llama",
    ],
)
def test_flags_that_agree(text: str) -> None:
    """Flags that describe the checkpoint's model are accepted."""
    found, model = parsed(text)
    assert found.problems == ()
    model.require(SHAPE)


@pytest.mark.parametrize(
    "text,what",
    [
        ("--num-layers 3", "--num-layers 3"),
        ("--num-key-value-heads 2", "--num-query-groups 2"),
        ("--use-rope-scaling --rope-scaling-factor 4", "--use-rope-scaling"),
        ("--add-bias-linear", "--add-bias-linear"),
        ("--no-position-embedding", "--no-position-embedding"),
        ("--model-family bert", "--model-family bert"),
        ("--model-family brt", "--model-family brt"),
    ],
)
def test_flags_that_contradict(text: str, what: str) -> None:
    """Flags of another model are errors."""
    _, model = parsed(text)
    with pytest.raises(ConfigError, match=f"`{what}` contradicts the checkpoint"):
        model.require(SHAPE)


def test_a_family_that_contradicts() -> None:
    """The names of the decoders are no names of a BERT."""
    _, model = parsed("--model-family gpt")
    with pytest.raises(ConfigError) as caught:
        model.require(SHAPE | {"model_family": "bert"})
    assert caught.value.why == "its model is `bert`"
    _, model = parsed("--model-family BERT")
    model.require(SHAPE | {"model_family": "bert"})


@pytest.mark.parametrize(
    "text,reason",
    [
        ("--lr 1e-4", "used by training only"),
        ("--rampup-batch-size 2 2 1_000", "used by training only"),
        ("--checkpoint-activations", "used by training only"),
        ("--recompute-granularity full", "used by training only"),
        ("--no-load-optim", "used by training only"),
        ("--context-parallel-size 4", "only tensor parallelism and pipelines"),
        ("--ckpt-format torch", "the format of a checkpoint is detected"),
        ("--hidden-size 24", "compared with the checkpoint"),
    ],
)
def test_no_effect(text: str, reason: str) -> None:
    """Flags of training change nothing, and the reason is said."""
    found, _ = parsed(text)
    assert found.problems == ()
    ((shown, why),) = found.without_effect.items()
    assert shown == text
    assert why.startswith(reason)


@pytest.mark.parametrize("text", ["--num-experts 4", "--num-layers x", "--unknown-flag 3"])
def test_refused(text: str) -> None:
    """Flags that training refuses are refused here too."""
    found, _ = parsed(text)
    (problem,) = found.problems
    assert text.split(maxsplit=1)[0] in problem.what


def test_different_values() -> None:
    """Of several values of a flag the last one is compared with the checkpoint; a line says so."""
    found, model = parsed("--num-layers 2 --num-layers 4 --num-layers 3 --swiglu --no-swiglu")
    assert found.problems == ()
    assert model.values == {"num_layers": 3, "swiglu": False}
    assert list(found.without_effect) == ["--num-layers 3", "--no-swiglu"]
    assert found.notices[-1] == (
        "given more than once, the last value counts: "
        "`--num-layers 3` (not `--num-layers 2`, `--num-layers 4`), `--no-swiglu` (not `--swiglu`)"
    )


@pytest.mark.parametrize(
    "rope", ["--use-rotary-position-embeddings", "--position-embedding-type rope"]
)
def test_no_learned_positions_beside_rotary_ones(rope: str) -> None:
    """A Llama of a DeepSpeed fork is described by both flags, in any order."""
    for text in (f"{rope} --no-position-embedding", f"--no-position-embedding {rope}"):
        found, model = parsed(text)
        assert found.problems == ()
        assert found.replaced == {}
        assert model.values["position_embedding_type"] == "rope"


def test_generation() -> None:
    """Flags of Megatron's script have their meaning, and own flags are left to the command."""
    model = GivenModel()
    flags = generate_flags({"--tokens", "--no-json"}, model)
    assert flags["--genfile"].translate(("x",)).flags == ("--sample-output-file", "x")
    assert flags["--recompute"].translate(()).flags == ("--no-cache",)
    assert flags["--bf16"].translate(()).flags == ("--precision", "bf16")
    assert "--num-layers" in flags
    assert "--num-layers" not in generate_flags({"--num-layers"}, model)


def test_serving() -> None:
    """Flags of Megatron's server have their meaning, or a reason why they have no effect."""
    model = GivenModel()
    found = parse_flags(
        ["--inference-max-requests", "4", "--top_p", "0.9", "--num-layers", "2", "--lr", "1"],
        {},
        foreign=serve_flags((), model),
    )
    flags = serve_flags({"--seed"}, model)
    assert flags["--inference-max-requests"].translate(("4",)).flags == ("--max-requests", "4")
    assert flags["--top-p"].translate(("0.9",)).no_effect == "each request has its own"
    assert "--seed" not in flags
    assert model.values == {"num_layers": 2}
    assert len(found.problems) == 1  # `--max-requests` is the command's
