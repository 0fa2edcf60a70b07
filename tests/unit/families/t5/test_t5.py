"""T5: its table and its modules, counts, losses, masks, and settings that it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_states import drawn
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import ConfigError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.load import load_config
from lmcore.config.validate import validate
from lmcore.contract import OP_SPECS, OpImpl, OpTable
from lmcore.families.op_binding import OpBinding
from lmcore.families.t5.block import distance_buckets
from lmcore.families.t5.family import T5, forward_flops, parameters, stacks
from lmcore.families.t5.model import T5Model
from lmcore.model.family import family_of, named_family, parameter_shapes
from lmcore.model.parameters import parameter_count
from lmcore.parallel.pipeline_split import own_part

from .conftest import KINDS, LATER, ORIGINAL, shape_of

PP = "--global-batch-size 64 --pipeline-model-parallel-size"
SPLIT = "--pipeline-model-parallel-split-rank"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_the_modules(kind: str, ops: OpBinding) -> None:
    """Names and shapes of the table are the modules' own."""
    shape = shape_of(**KINDS[kind])
    with torch.device("meta"):
        model = T5Model(shape, ops)
    found = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert found == parameter_shapes(shape)


@pytest.mark.parametrize("size, split", [(2, 1), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_pipeline(kind: str, size: int, split: int, ops: OpBinding) -> None:
    """Together they have all parameters; `holders` names the parts that have the same one."""
    shape = shape_of(**KINDS[kind])
    layout = ParallelLayout(pipeline=size, pipeline_split=split)
    parts = [own_part(stacks(shape), rank, layout) for rank in range(size)]
    with torch.device("meta"):
        models = [T5Model(shape, ops, part=part) for part in parts]
    found: dict[str, list[int]] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            assert tuple(parameter.shape) == parameter_shapes(shape)[name]
            found.setdefault(name, []).append(number)
        held = {id(one) for module in model.layers for one in module.parameters()}
        modules = model.stage_modules(first=number == 0, last=number == size - 1).values()
        held |= {id(one) for module in modules for one in module.parameters()}
        assert held == {id(one) for one in model.parameters()}, "ZeRO shards a stage's modules"
    assert found.keys() == parameter_shapes(shape).keys()
    several = {name: tuple(numbers) for name, numbers in found.items() if len(numbers) > 1}
    assert models[0].holders(parts) == several
    embedding = (0, split) if kind == "1.1" or split == size - 1 else (0, split, size - 1)
    assert several["token_embedding.weight"] == embedding


def test_half_of_a_pipeline_is_the_encoders() -> None:
    """Unless another process is named."""
    for more, split in (("", 2), (f" {SPLIT} 1", 1)):
        config = load_config(f"--model-family t5 {PP} 4{more}".split()).config
        assert ParallelLayout.of(config, 4).pipeline_split == split
    assert ParallelLayout.of(load_config(f"{PP} 4".split()).config, 4).pipeline_split == 0


@pytest.mark.parametrize(
    "sizes, kind, count",
    [
        ((6, 512, 8, 64, 2048), ORIGINAL, 60_506_624),
        ((12, 768, 12, 64, 3072), ORIGINAL, 222_903_552),
        ((8, 512, 6, 64, 1024), LATER, 76_961_152),
    ],
    ids=["t5-small", "t5-base", "t5-v1_1-small"],
)
def test_published_counts(sizes: tuple[int, ...], kind: dict[str, Any], count: int) -> None:
    """The published models have as many parameters."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "head_dim", "ffn_hidden_size")
    more = {"decoder_num_layers": 0, "relative_attention_num_buckets": 32}
    shape = shape_of(**dict(zip(names, sizes, strict=True)), padded_vocab_size=32128, **kind | more)
    assert parameter_count(parameters(shape)) == count


def test_the_record() -> None:
    """The family is chosen by its name."""
    assert family_of(load_config(["--model-family", "t5"]).config.model) is T5
    assert named_family("T5") is T5


def reference(model: T5Model, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a T5 with learned positions, in torch's functions and float64."""
    weights = {name: one.detach().double() for name, one in model.named_parameters()}
    shape = model.shape

    def norm(name: str, x: Tensor) -> Tensor:
        gain, offset = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, (shape.hidden_size,), gain, offset, shape.layernorm_epsilon)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, name: str) -> Tensor:
        scores = heads(q) @ heads(k).transpose(-1, -2) / math.sqrt(shape.head_dim)
        out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ heads(v)
        out = out.transpose(1, 2).flatten(2)
        return out @ weights[f"{name}.output.weight"].T + weights[f"{name}.output_bias"]

    def project(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def embed(tokens: Tensor) -> Tensor:
        places = weights["position_embedding.weight"][: tokens.shape[1]]
        return weights["token_embedding.weight"][tokens] + places

    def block(name: str, x: Tensor, hidden: Tensor, memory: Tensor | None) -> Tensor:
        packed = project(f"{name}.attention.qkv", norm(f"{name}.attention_norm", x))
        x = x + attend(*packed.chunk(3, dim=-1), hidden, f"{name}.attention")
        if memory is not None:
            q = project(f"{name}.cross_attention.query", norm(f"{name}.cross_attention_norm", x))
            k, v = project(f"{name}.cross_attention.key_value", memory).chunk(2, dim=-1)
            x = x + attend(q, k, v, padding, f"{name}.cross_attention")
        up = norm(f"{name}.feed_forward_norm", x) @ weights[f"{name}.feed_forward.up.weight"].T
        up = functional.gelu(up + weights[f"{name}.feed_forward.up_bias"], approximate="tanh")
        down = up @ weights[f"{name}.feed_forward.down.weight"].T
        return x + down + weights[f"{name}.feed_forward.down_bias"]

    padding = batch["padding_BS"][:, None, None, :]
    memory = embed(batch["tokens_BS"])
    for layer in range(shape.num_layers):
        memory = block(f"encoder.{layer}", memory, padding, None)
    memory = norm("encoder_norm", memory)
    x = embed(batch["decoder_tokens_BD"])
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    for layer in range(shape.own["decoder_num_layers"]):
        x = block(f"decoder.{layer}", x, later, memory)
    logits = norm("decoder_norm", x) @ weights["token_embedding.weight"].T
    return logits + weights["head.bias"]


def test_learned_positions(make_t5: Callable[..., T5Model], batch: dict[str, Tensor]) -> None:
    """Megatron's model agrees with one that is written here, in logits and loss."""
    model = make_t5()
    memory = model.memory(batch["tokens_BS"], batch["padding_BS"])
    found = model.logits(model.hidden(batch["decoder_tokens_BD"], memory, batch["padding_BS"]))
    expected = reference(model, batch)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    each = functional.cross_entropy(
        expected.flatten(0, 1), batch["targets_BD"].flatten(), reduction="none"
    )
    loss = (each * batch["loss_weight_BD"].flatten()).sum()
    torch.testing.assert_close(model.loss(**batch).double(), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_seen(
    kind: str, make_t5: Callable[..., T5Model], batch: dict[str, Tensor]
) -> None:
    """Padding of the encoder, and later tokens of the decoder, change no earlier state."""
    model = make_t5(**KINDS[kind])

    def states(tokens: Tensor, decoder: Tensor) -> Tensor:
        memory = model.memory(tokens, batch["padding_BS"])
        return model.hidden(decoder, memory, batch["padding_BS"])

    tokens, decoder = batch["tokens_BS"], batch["decoder_tokens_BD"]
    before = states(tokens, decoder)
    padded = tokens.clone()
    padded[1, 6:] = 9
    torch.testing.assert_close(states(padded, decoder), before)
    other = decoder.clone()
    other[:, 3:] = 11
    changed = states(tokens, other)
    torch.testing.assert_close(changed[:, :3], before[:, :3])
    assert not torch.allclose(changed[:, 3:], before[:, 3:])
    tokens = tokens.clone()
    tokens[:, 5] = 13
    assert not torch.allclose(states(tokens, decoder)[:, 0], before[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_counts(
    kind: str, make_t5: Callable[..., T5Model], batch: dict[str, Tensor]
) -> None:
    """Each parameter has a gradient."""
    model = make_t5(**KINDS[kind])
    model.loss(**batch).backward()
    idle = [name for name, one in model.named_parameters() if not one.grad.abs().any()]
    assert idle == []


def test_buckets() -> None:
    """Half of the groups are single distances, the others grow up to the largest distance."""
    distance = torch.arange(-200, 3)
    one = {"num_buckets": 32, "max_distance": 128}
    causal = distance_buckets(distance, bidirectional=False, **one)
    assert causal[-3:].tolist() == [0, 0, 0]  # the query itself, and later keys
    assert causal[200 - 15 : 201].tolist() == [*range(15, -1, -1)]
    assert causal[200 - 128] == causal[0] == 31
    assert causal.diff().max() <= 0
    both = distance_buckets(torch.tensor([-5, 5, -300, 300]), bidirectional=True, **one)
    assert both.tolist() == [5, 16 + 5, 15, 31]


def kernel(name: str, *traits: str) -> OpImpl:
    target = "lmcore.contract.op.torch_kernels:attention"
    return OpImpl("attention", name, target, traits=frozenset(traits), plugin="chip")


def test_the_kernel_gives_the_gradient_of_the_bias() -> None:
    """Relative positions bind a kernel that claims it; cross-attention, masked or not, any."""
    impls = [
        kernel("fast"),
        kernel("biased", "score_bias"),
        kernel("trained", "score_bias", "score_bias_gradient"),
    ]
    table = OpTable(OP_SPECS, impls, preferences={"attention": ("fast", "biased")})
    with torch.device("meta"):
        T5Model(shape_of(**ORIGINAL), OpBinding(table, "cpu", "float32"))
    found = [one for one in table.resolutions if one.op == "attention"]
    cases = [
        (one.chosen, one.context.attributes["causal"], one.context.attributes.get("score_bias"))
        for one in found
    ]
    assert cases == [("trained", False, True), *[("fast", False, None)] * 2]
    assert dict(found[0].rejected)["biased"] == (
        "gives no gradient of a bias of the scores: it does not claim the trait "
        "`score_bias_gradient`"
    )
    strict = OpTable(OP_SPECS, impls[:2], strict=True)
    with pytest.raises(ConfigError, match="op `attention` has no kernel for this case"):
        strict.bind("attention", found[0].context)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("scaled", [False, True])
def test_kernels_learn_the_positions(
    dropout: float, scaled: bool, batch: dict[str, Tensor]
) -> None:
    """A kernel of torch has the reference's losses and gradients, also of the positions' tables."""
    values = ORIGINAL | {"t5_scaled_attention": scaled, "attention_dropout": dropout}
    found = []
    for impls in ([], [kernel("sdpa", "score_bias", "score_bias_gradient")]):
        ops = OpBinding(OpTable(OP_SPECS, impls), "cpu", "float64")
        model = drawn(T5Model(shape_of(**values), ops)).double()
        torch.manual_seed(5)
        loss = model.loss(**batch)
        loss.backward()
        found.append((loss, {name: one.grad for name, one in model.named_parameters()}))
    assert found[0][1]["encoder_bias.weight"].abs().sum() > 0.01
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-9)


def test_flops() -> None:
    """A decoder of another length costs the difference; the head is the decoder's."""
    shape = shape_of()
    same, short = forward_flops(shape, 12), forward_flops(shape, 12, 6)
    assert same == forward_flops(shape, 12, 12)
    assert same.rest == 2 * short.rest == 12 * 2 * 24 * 32
    assert same.layers > short.layers > same.layers / 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--context-parallel-size 2", "`--context-parallel-size 2` is not supported by T5 models"),
        (f"{PP} 2 {SPLIT} 0", "-split-rank 0` leaves the encoder without a process"),
        (f"{PP} 2 {SPLIT} 2", "-split-rank 2` leaves the decoder without a process"),
        (f"{PP} 4 --decoder-num-layers 1", "the decoder has 1 layer, fewer than its 2 stages"),
        (f"{PP} 4 {SPLIT} 3 --num-layers 2", "the encoder has 2 layers, fewer than its 3 stages"),
        (f"{PP} 2 --pipeline-schedule zero-bubble", "zero-bubble` is not supported by T5 models"),
        (f"{PP} 2 {VIRTUAL} 1", "-virtual-pipeline-stage 1` is not supported by T5 models"),
        ("--swiglu", "`--swiglu` is not supported by T5 models"),
        ("--position-embedding-type rope", "-type rope` is not supported by T5 models"),
        ("--reset-attention-mask", "`--reset-attention-mask` is not supported by T5 models"),
        ("--seq-length 3", "`--seq-length 3` is too short for T5"),
        ("--decoder-seq-length 10", "`--decoder-seq-length 10` is too short for T5"),
        ("--decoder-seq-length 200", "`--decoder-seq-length 200` exceeds the 128 learned"),
        ("--task classification --task-data x", "is not supported by T5 models"),
    ],
)
def test_refused_settings(flags: str, message: str) -> None:
    """A setting that T5 does not have is an error that names it."""
    loaded = load_config(["--model-family", "t5", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(loaded, world_size=4)
    assert message in str(caught.value)


def test_relative_positions_are_t5s() -> None:
    """Other families refuse them, and say which has them."""
    loaded = load_config(["--position-embedding-type", "relative"])
    with pytest.raises(ConfigError) as caught:
        validate(loaded, world_size=1)
    assert "`--position-embedding-type relative` is not supported by GPT" in str(caught.value)
    assert "`--model-family t5`" in str(caught.value.hint)
