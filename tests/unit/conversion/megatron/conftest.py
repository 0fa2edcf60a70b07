"""megatron-core on the CPU, for comparisons with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from suite.selection import peer

from lmcore.families.t5.family import decoder_layers, gated
from lmcore.model.shape import ModelShape

MakeModel = Callable[..., torch.nn.Module]


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
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        make = torch.tensor
        patch.setattr(
            torch, "tensor", lambda data, *, dtype=None, device=None: make(data, dtype=dtype)
        )
        yield core
    parallel_state.destroy_model_parallel()
    if own_group:
        dist.destroy_process_group()


@pytest.fixture
def core_model(megatron: Any) -> MakeModel:
    """Makes megatron-core's model of a shape, with its local layers."""
    makers = {"bert": make_core_bert, "t5": make_core_t5}
    return lambda shape, **values: makers.get(shape.model_family, make_core_gpt)(shape, **values)


def make_core_gpt(shape: ModelShape) -> torch.nn.Module:
    """Return megatron-core's decoder of a shape, with its local layers."""
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


def make_core_bert(shape: ModelShape, *, first: bool = True) -> torch.nn.Module:
    """Return megatron-core's BERT of a shape, with its local layers.

    Args:
        shape: Shape of the model.
        first: True if it has the embeddings, as the first stage of a pipeline.
    """
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer import TransformerConfig

    own = shape.own
    approximate = "tanh" if own["bert_gelu"] == "tanh" else "none"
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.layernorm_epsilon,
        activation_func=functools.partial(torch.nn.functional.gelu, approximate=approximate),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return BertModel(
        config=config,
        num_tokentypes=own["bert_token_types"],
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=True,
        parallel_output=False,
        pre_process=first,
        add_binary_head=own["bert_binary_head"],
    ).eval()


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU in the approximation of Megatron's fused kernel."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def make_core_t5(shape: ModelShape) -> torch.nn.Module:
    """Return megatron-core's T5 of a shape, with its local layers."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer import TransformerConfig

    own, decoder = shape.own, decoder_layers(shape)
    config = TransformerConfig(
        num_layers=decoder,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.layernorm_epsilon,
        normalization=shape.normalization,
        gated_linear_unit=gated(shape),
        activation_func=torch.nn.functional.silu if gated(shape) else tanh_gelu,
        add_bias_linear=shape.add_bias_linear,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    specs = (
        t5_spec.get_t5_encoder_with_local_block_spec(shape.num_layers),
        t5_spec.get_t5_decoder_with_local_block_spec(decoder),
    )
    for spec in specs:
        spec.layer_norm = t5_spec.LNImpl  # theirs is a package's that the CPU does not have
    return T5Model(
        config=config,
        encoder_config=replace(config, num_layers=shape.num_layers),
        transformer_encoder_layer_spec=specs[0],
        transformer_decoder_layer_spec=specs[1],
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type=shape.position_embedding_type,
        relative_attention_num_buckets=own["relative_attention_num_buckets"],
        relative_attention_max_distance=own["relative_attention_max_distance"],
        share_embeddings_and_output_weights=shape.tied,
    ).eval()
