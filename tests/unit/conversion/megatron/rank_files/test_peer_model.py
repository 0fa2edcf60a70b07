"""Written files against megatron-core: its own model loads them and computes the same logits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_models import (
    BERT,
    BIASED_LLAMA,
    GPT,
    LLAMA,
    MASKED_BERT,
    RELATIVE_T5,
    T5,
    MemoryState,
    assert_same,
    record,
)
from model_states import bert_shape

from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import parameter_of
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import Progress
from lmcore.families.bert.model import Bert
from lmcore.families.gpt import model as gpt
from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL
from lmcore.families.t5.model import T5Model
from lmcore.model.shape import ModelShape

MakeModel = Callable[..., torch.nn.Module]

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("shape", [GPT, LLAMA, BIASED_LLAMA], ids=["gpt", "llama", "biased"])
def test_logits(core_model: MakeModel, shape: ModelShape, tmp_path: Path) -> None:
    """Its strict loader takes every tensor and no other, and its logits are lmcore's."""
    state = MemoryState(shape)
    write_megatron(state, tmp_path, None, layout=Layout(), style="core-local")
    content = load_content(tmp_path / "release/mp_rank_00/model_optim_rng.pt")
    theirs = core_model(shape)
    missing = theirs.load_state_dict(content["model"], strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("_extra_state") for name in missing.missing_keys)
    assert [name for name, _ in theirs.named_parameters()] == list(content["model"])
    ours = gpt.GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), KEEP_ALL)
    ours.load_state_dict({name: state.read(name) for name in state.parameters})
    length = shape.max_position_embeddings
    tokens = torch.randint(0, shape.padded_vocab_size, (2, length))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected = theirs(tokens, torch.arange(length).expand_as(tokens), mask)
        found = ours.logits(ours(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [GPT, LLAMA, BERT, MASKED_BERT, T5, RELATIVE_T5],
    ids=["gpt", "llama", "bert", "masked head", "t5", "relative t5"],
)
def test_optimizer(
    core_model: MakeModel,
    shape: ModelShape,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its optimizer takes the state; each parameter has its own; what it saves is read back."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = dtype == torch.bfloat16
    name_of = torch.Tensor.type
    if half:  # it asks for the type of a tensor on its accelerator
        monkeypatch.setattr(
            torch.Tensor,
            "type",
            lambda tensor, *to: name_of(tensor, *to) if to else "torch.cuda.BFloat16Tensor",
        )
    progress = Progress(6, 48, 5, adam={"beta1": 0.85, "beta2": 0.95, "eps": 1e-6})
    state = MemoryState(shape, optimizer=True, progress=progress)
    write_megatron(state, tmp_path, None, style="core-local", dtype=dtype)
    path = tmp_path / "iter_0000006/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    model = core_model(shape).to(dtype)
    model.load_state_dict(content["model"], strict=False)
    model.ddp_config = DistributedDataParallelConfig()
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=half, params_dtype=dtype)
    optimizer = get_megatron_optimizer(config, [model])
    optimizer.load_state_dict(content["optimizer"])
    names = Layout().parameters(shape, 0, 0, "core-local")
    packing = Packing(shape, 1)
    parameters = dict(model.named_parameters())
    for foreign, name in names:
        main = parameters[foreign].main_param if half else parameters[foreign]
        held = optimizer.chained_optimizers[0].optimizer.state[main]
        for kind in ("exp_avg", "exp_avg_sq"):
            (expected,) = packing.split(name, state.read(name, kind))
            assert torch.equal(held[kind], expected), (name, kind)
        (expected,) = packing.split(name, state.read(name))
        assert torch.equal(main.data, expected)
        assert held["step"] == 5
    content["model"] = model.state_dict()
    content["optimizer"] = optimizer.state_dict()
    torch.save(content, path)
    found = MegatronState(tmp_path)
    assert_same(found, state)
    assert found.progress is not None
    assert found.progress.optimizer_step == 5


@pytest.mark.parametrize("bucket", [None, 1500], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("shape", [GPT, LLAMA, BERT, T5], ids=["gpt", "llama", "bert", "t5"])
def test_distributed_optimizer(
    core_model: MakeModel,
    shape: ModelShape,
    bucket: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers that its distributed optimizer saves are read parameter by parameter."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    kinds, name_of = {torch.bfloat16: "BFloat16Tensor"}, torch.Tensor.type
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.Tensor,
        "type",
        lambda tensor, *to: (
            name_of(tensor, *to) if to else f"torch.cuda.{kinds.get(tensor.dtype, 'FloatTensor')}"
        ),
    )
    model = core_model(shape).bfloat16()
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        bucket_size=bucket,
        overlap_grad_reduce=bucket is not None,
    )
    model.config.bf16, model.config.params_dtype = True, torch.bfloat16
    replica = DistributedDataParallel(model.config, settings, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [replica])
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.randn_like(parameter.main_grad))
    (inner,) = optimizer.chained_optimizers
    inner.prepare_grads()
    inner.step_with_ready_grads()
    directory = tmp_path / "iter_0000001" / "mp_rank_00"
    directory.mkdir(parents=True)
    optimizer.save_parameter_state(str(directory / "distrib_optim.pt"))
    content = {
        "args": argparse.Namespace(**architecture_arguments(shape)),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "model": replica.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, directory / "model_optim_rng.pt")
    found = MegatronState(tmp_path / "iter_0000001")
    assert found.kinds == ("weight", "exp_avg", "exp_avg_sq")
    packing = Packing(shape, 1)
    for foreign, parameter in model.named_parameters():
        name = parameter_of(foreign, swiglu=shape.swiglu, names=record(shape))
        held = inner._get_main_param_and_optimizer_states(parameter)
        for kind, key in {
            "weight": "param",
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
        }.items():
            expected = packing.join(name, [held[key].view(parameter.shape)])
            assert torch.equal(found.read(name, kind), expected), (name, kind)


@pytest.mark.parametrize("shape", [BERT, MASKED_BERT], ids=["both heads", "masked head"])
def test_order_of_the_last_stage(core_model: MakeModel, shape: ModelShape) -> None:
    """The copy of the embedding is between the heads, where megatron-core makes it."""
    theirs = core_model(replace(shape, num_layers=2), first=False)
    ours = Layout(1, 2).parameters(shape, 1, 0, "core-local")
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours]


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("head", [True, False], ids=["both heads", "masked head"])
def test_bert(core_model: MakeModel, tmp_path: Path, gelu: str, head: bool) -> None:
    """megatron-core's BERT takes every tensor of either format, and its logits are lmcore's."""
    from megatron.core import dist_checkpointing, parallel_state

    own = {"bert_post_norm": False, "bert_gelu": gelu, "bert_binary_head": head}
    shape = bert_shape(**own, bert_token_types=2 if head else 0)
    state = MemoryState(shape)
    write_megatron(state, tmp_path / "ranks", None, style="core-local")
    content = load_content(tmp_path / "ranks/release/mp_rank_00/model_optim_rng.pt")
    theirs = core_model(shape)
    missing = theirs.load_state_dict(content["model"], strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("_extra_state") for name in missing.missing_keys)
    assert [name for name, _ in theirs.named_parameters()] == list(content["model"])

    write_distributed(state, tmp_path / "dist", None)
    other = core_model(shape)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = {"model": other.sharded_state_dict(metadata={"dp_cp_group": group})}
    loaded = dist_checkpointing.load(tensors, str(tmp_path / "dist/release"))
    other.load_state_dict(loaded["model"])
    for (name, one), (_, same) in zip(
        theirs.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(one, same), name

    ours = Bert(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), KEEP_ALL).eval()
    ours.load_state_dict({name: state.read(name) for name in state.parameters})
    tokens = torch.randint(0, shape.padded_vocab_size, (2, 12))
    types = (torch.arange(12) > 5).long().expand_as(tokens)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True
    every = torch.arange(12).expand_as(tokens)
    with torch.no_grad():
        logits, order = theirs(tokens, (~padding).long(), types if head else None)
        hidden = ours.hidden(tokens, types, padding)
        found = ours.masked_logits(hidden, every)
        torch.testing.assert_close(found[~padding], logits[~padding], rtol=1e-4, atol=1e-4)
        if head:
            torch.testing.assert_close(ours.order_logits(hidden), order, rtol=1e-4, atol=1e-4)

    directory = tmp_path / "theirs/iter_0000001"
    directory.mkdir(parents=True)
    saved = {"args": argparse.Namespace(**architecture_arguments(shape)), "iteration": 1}
    dist_checkpointing.save(
        saved | {"model": theirs.sharded_state_dict(metadata={"dp_cp_group": group})},
        str(directory),
    )
    again = DistributedState(directory)
    assert again.shape == shape
    for name in state.parameters:
        assert torch.equal(again.read(name), state.read(name)), name


@pytest.mark.parametrize("shape", [T5, RELATIVE_T5], ids=["learned", "relative"])
def test_t5(core_model: MakeModel, tmp_path: Path, shape: ModelShape) -> None:
    """megatron-core's T5 takes every tensor of either format; its logits are lmcore's."""
    from megatron.core import dist_checkpointing, parallel_state

    state = MemoryState(shape)
    write_megatron(state, tmp_path / "ranks", None, style="core-local")
    content = load_content(tmp_path / "ranks/release/mp_rank_00/model_optim_rng.pt")
    theirs = core_model(shape)
    missing = theirs.load_state_dict(content["model"], strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("_extra_state") for name in missing.missing_keys)

    write_distributed(state, tmp_path / "dist", None)
    other = core_model(shape)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = {"model": other.sharded_state_dict(metadata={"dp_cp_group": group})}
    loaded = dist_checkpointing.load(tensors, str(tmp_path / "dist/release"))
    other.load_state_dict(loaded["model"])
    for (name, one), (_, same) in zip(
        theirs.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(one, same), name

    if shape.relative_positions:
        return  # its attention in torch takes no biases

    ours = T5Model(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), KEEP_ALL, masked=True)
    ours.eval().load_state_dict({name: state.read(name) for name in state.parameters})
    source = torch.randint(0, shape.padded_vocab_size, (2, 12))
    tokens = torch.randint(0, shape.padded_vocab_size, (2, 7))
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 9:] = True
    hidden = padding[:, None, None, :]
    later = torch.ones(7, 7, dtype=torch.bool).triu(1).expand(2, 1, 7, 7)
    with torch.no_grad():
        expected = theirs(
            source, tokens, hidden.expand(2, 1, 12, 12), later, hidden.expand(2, 1, 7, 12)
        )
        found = ours.logits(ours.hidden(tokens, ours.memory(source, padding), padding))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
