"""`torch_dist` against megatron-core: what it writes is read, and it reads what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_models import (
    BERT,
    BIASED_LLAMA,
    GPT,
    LLAMA,
    RELATIVE_T5,
    T5,
    MemoryState,
    assert_same,
    record,
)

from lmcore.conversion.megatron.directory import is_megatron_dist
from lmcore.conversion.megatron.parameters.names import parameter_of
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import ADAM, WEIGHT, Progress
from lmcore.model.shape import ModelShape

MakeModel = Callable[[ModelShape], torch.nn.Module]

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "by layer"])
@pytest.mark.parametrize("shape", [GPT, LLAMA, BERT, T5], ids=["gpt", "llama", "bert", "t5"])
def test_reading(core_model: MakeModel, shape: ModelShape, stacked: bool, tmp_path: Path) -> None:
    """Weights and state of Adam equal its model's, and so do its step and settings."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = core_model(shape)
    model.ddp_config = DistributedDataParallelConfig()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    inner = optimizer.chained_optimizers[0].optimizer
    inner.step()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": not stacked}
    tensors = model.sharded_state_dict(metadata=metadata)
    content = {
        "args": argparse.Namespace(**architecture_arguments(shape), consumed_train_samples=24),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": tensors,
        "optimizer": optimizer.sharded_state_dict(tensors, metadata=metadata),
    }
    (tmp_path / "iter_0000003").mkdir()
    dist_checkpointing.save(content, str(tmp_path / "iter_0000003"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")

    assert is_megatron_dist(tmp_path)
    found = DistributedState(tmp_path)
    assert (found.shape, found.kinds) == (shape, (WEIGHT, *ADAM))
    settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    assert found.progress == Progress(3, 24, 1, adam=settings)
    packing, compared = Packing(shape, 1), set()
    for foreign, parameter in model.named_parameters():
        name = parameter_of(foreign, swiglu=shape.swiglu, names=record(shape))
        expected = {kind: inner.state[parameter][kind] for kind in ADAM} | {WEIGHT: parameter.data}
        for kind, tensor in expected.items():
            assert torch.equal(found.read(name, kind), packing.join(name, [tensor])), (name, kind)
        compared.add(name)
    assert compared == found.parameters.keys()


@pytest.mark.parametrize(
    "shape", [GPT, LLAMA, BIASED_LLAMA, RELATIVE_T5], ids=["gpt", "llama", "biased", "t5"]
)
def test_writing(core_model: MakeModel, shape: ModelShape, tmp_path: Path) -> None:
    """Its own strict loader fills its model with the written weights."""
    from megatron.core import dist_checkpointing, parallel_state

    state = MemoryState(shape, progress=Progress(3, 24))
    write_distributed(state, tmp_path, None)
    checkpoint = str(tmp_path / "iter_0000003")
    assert dist_checkpointing.check_is_distributed_checkpoint(checkpoint)
    model = core_model(shape)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}
    loaded = dist_checkpointing.load(tensors, checkpoint)
    model.load_state_dict(loaded["model"])
    assert loaded["args"].num_layers == shape.num_layers
    packing = Packing(shape, 1)
    for foreign, parameter in model.named_parameters():
        name = parameter_of(foreign, swiglu=shape.swiglu, names=record(shape))
        assert torch.equal(packing.join(name, [parameter.data]), state.read(name)), name


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA, BERT, T5], ids=["gpt", "llama", "bert", "t5"])
def test_writing_the_state_of_adam(  # noqa: PLR0915 - one way there and back
    core_model: MakeModel,
    shape: ModelShape,
    dtype: torch.dtype,
    distributed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plain and its distributed optimizer load it bit by bit; the latter's save is read."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half, name_of = dtype == torch.bfloat16, torch.Tensor.type
    kinds = {torch.bfloat16: "BFloat16Tensor"}
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.Tensor,
        "type",
        lambda tensor, *to: (
            name_of(tensor, *to) if to else f"torch.cuda.{kinds.get(tensor.dtype, 'FloatTensor')}"
        ),
    )
    adam = {"beta1": 0.85, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}
    state = MemoryState(shape, optimizer=True, progress=Progress(6, 48, 5, adam=adam))
    write_distributed(state, tmp_path, None, dtype=dtype, style="core-local")
    checkpoint = str(tmp_path / "iter_0000006")

    model = core_model(shape).to(dtype)
    model.config.bf16, model.config.params_dtype = half, dtype
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
    )
    replica = DistributedDataParallel(model.config, settings, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=half,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [replica])
    for parameter in model.parameters():  # a state of its own, which is replaced
        parameter.main_grad.copy_(torch.randn_like(parameter.main_grad))
    optimizer.chained_optimizers[0].prepare_grads()
    optimizer.chained_optimizers[0].step_with_ready_grads()
    metadata = dist_checkpointing.load_content_metadata(checkpoint)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata["dp_cp_group"] = group
    tensors = {"model": model.sharded_state_dict(metadata=metadata)}
    tensors["optimizer"] = optimizer.sharded_state_dict(
        tensors["model"], is_loading=True, metadata=metadata
    )
    loaded = dist_checkpointing.load(tensors, checkpoint)
    model.load_state_dict(loaded["model"])
    (inner,) = optimizer.chained_optimizers
    if distributed:  # it copies the steps of torch's Adam from tensors, which never have them
        fill = inner._set_main_param_and_optimizer_states
        monkeypatch.setattr(
            inner,
            "_set_main_param_and_optimizer_states",
            lambda parameter, found: fill(
                parameter, {**found, "step": next(iter(inner.optimizer.state.values()))["step"]}
            ),
        )
    optimizer.load_state_dict(loaded["optimizer"])
    packing = Packing(shape, 1)
    for foreign, parameter in model.named_parameters():
        name = parameter_of(foreign, swiglu=shape.swiglu, names=record(shape))
        if distributed:
            held = inner._get_main_param_and_optimizer_states(parameter)
        else:
            main = parameter.main_param if half else parameter
            held = {**inner.optimizer.state[main], "param": main.data}
            assert held["step"] == 5
        for kind, key in {WEIGHT: "param", **{kind: kind for kind in ADAM}}.items():
            expected = packing.join(name, [held[key].view(parameter.shape)])
            assert torch.equal(state.read(name, kind), expected), (name, kind)
        assert torch.equal(packing.join(name, [parameter.data]), state.read(name).to(dtype)), name
    assert {(one["betas"], one["eps"]) for one in inner.optimizer.param_groups} == {
        ((0.85, 0.95), 1e-6)
    }
    assert {one["weight_decay"] for one in inner.optimizer.param_groups} == {0.2, 0.0}
    assert {float(one["step"]) for one in inner.optimizer.state.values()} == {5.0}

    again = {"args": loaded["args"], "iteration": 6, "checkpoint_version": 3.0}
    again["model"] = model.sharded_state_dict(metadata=metadata)
    again["optimizer"] = optimizer.sharded_state_dict(again["model"], metadata=metadata)
    target = tmp_path / "again" / "iter_0000006"
    target.mkdir(parents=True)
    dist_checkpointing.save(again, str(target))
    found = DistributedState(target)
    assert_same(found, state)
    assert found.progress is not None
    assert (found.progress.optimizer_step, found.progress.adam) == (5, adam)
