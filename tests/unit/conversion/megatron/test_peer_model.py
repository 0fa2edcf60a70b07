"""Written files against megatron-core: its own model loads them and computes the same logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_models import BIASED_LLAMA, GPT, LLAMA, MemoryState, assert_same
from suite.selection import peer

from lmcore.accelerator import OP_SPECS, OpTable
from lmcore.conversion.megatron.layout import Layout
from lmcore.conversion.megatron.packing import Packing
from lmcore.conversion.megatron.read import MegatronState
from lmcore.conversion.megatron.records import load_content
from lmcore.conversion.megatron.write import write_megatron
from lmcore.conversion.state import Progress
from lmcore.model import gpt
from lmcore.model.op_binding import OpBinding
from lmcore.model.recompute import KEEP_ALL
from lmcore.model.shape import ModelShape

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """megatron-core in one process on the CPU, which it asks for its accelerator by name."""
    peer("megatron")
    from megatron import core
    from megatron.core import parallel_state, tensor_parallel

    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        tracker = tensor_parallel.get_cuda_rng_tracker()
        patch.setattr(tracker, "add", lambda name, seed: None)
        patch.setattr(tracker, "fork", lambda name="": contextlib.nullcontext())
        yield core
    parallel_state.destroy_model_parallel()
    if own_group:
        dist.destroy_process_group()


def core_model(shape: ModelShape) -> torch.nn.Module:
    """Return megatron-core's model of a shape, with its local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization=shape.normalization,
        gated_linear_unit=shape.swiglu,
        activation_func=torch.nn.functional.silu if shape.swiglu else tanh_gelu,
        add_bias_linear=shape.add_bias_linear,
        add_qkv_bias=shape.add_qkv_bias,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=shape.normalization),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type=shape.position_embedding_type,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        rope_scaling=shape.rope_scaling_factor != 1.0,
        rope_scaling_factor=shape.rope_scaling_factor,
        share_embeddings_and_output_weights=shape.tied,
    ).eval()


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in the approximation that Megatron's fused kernel computes."""
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("shape", [GPT, LLAMA, BIASED_LLAMA], ids=["gpt", "llama", "biased"])
def test_logits(megatron: Any, shape: ModelShape, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_optimizer(
    megatron: Any,
    shape: ModelShape,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its optimizer takes the state; each parameter has its own; what it saves is read back."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = dtype == torch.bfloat16
    make, name_of = torch.tensor, torch.Tensor.type
    monkeypatch.setattr(
        torch, "tensor", lambda data, *, dtype=None, device=None: make(data, dtype=dtype)
    )
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
