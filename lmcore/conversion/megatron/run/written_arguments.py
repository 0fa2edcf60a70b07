"""Arguments of a run that a written checkpoint of Megatron has, and notes on how to start one.

Both formats of Megatron have the same arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lmcore.conversion.megatron.parameters.vocabulary import vocabulary_notes, vocabulary_rows
from lmcore.conversion.megatron.run.schedule import schedule_arguments
from lmcore.model.megatron_names import names_for

if TYPE_CHECKING:
    from lmcore.conversion.megatron.parameters.layout import Layout
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["VERSION", "activation_notes", "architecture_arguments", "run_arguments", "start_notes"]

VERSION = 3.0
"""Value of `checkpoint_version`."""


def architecture_arguments(shape: ModelShape) -> dict[str, Any]:
    """Return the arguments of Megatron that describe a model.

    Args:
        shape: Shape of the model.
    """
    groups = shape.num_query_groups
    arguments: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "encoder_num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "kv_channels": shape.head_dim,
        "group_query_attention": groups != shape.num_attention_heads,
        "num_query_groups": groups if groups != shape.num_attention_heads else 1,
        "max_position_embeddings": shape.max_position_embeddings,
        "seq_length": shape.max_position_embeddings,
        "encoder_seq_length": shape.max_position_embeddings,
        "padded_vocab_size": shape.padded_vocab_size,
        "norm_epsilon": shape.layernorm_epsilon,
        "layernorm_epsilon": shape.layernorm_epsilon,
        "init_method_std": shape.init_method_std,
        "attention_dropout": shape.attention_dropout,
        "hidden_dropout": shape.hidden_dropout,
        "normalization": shape.normalization,
        "swiglu": shape.swiglu,
        "glu_activation": shape.glu_activation or None,
        "embed_layernorm": shape.embed_layernorm,
        "position_embedding_type": shape.position_embedding_type,
        "add_position_embedding": shape.learned_positions,
        "use_rotary_position_embeddings": shape.rotary,
        "rotary_base": shape.rotary_base,
        "rotary_percent": shape.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": shape.rope_scaling_factor != 1.0,
        "rope_scaling_factor": shape.rope_scaling_factor,
        "untie_embeddings_and_output_weights": shape.untie_embeddings_and_output_weights,
        "add_bias_linear": shape.add_bias_linear,
        "add_qkv_bias": shape.add_qkv_bias,
        "openai_gelu": False,
        "squared_relu": False,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "qk_layernorm": False,
        "num_experts": None,
        "multi_latent_attention": False,
    }
    names = names_for(shape)
    return arguments if names is None else arguments | names.arguments(shape)


def run_arguments(
    state: ModelState,
    shape: ModelShape,
    tokenizer: Tokenizer | None,
    layout: Layout,
    dtype: torch.dtype,
) -> argparse.Namespace:
    """Return the arguments of a run of Megatron that would write a checkpoint of *state*.

    Args:
        state: Model to write.
        shape: Shape with the number of rows that are written.
        tokenizer: Tokenizer of the model; None: it is not known.
        layout: Parallel layout.
        dtype: Dtype of the weights.
    """
    parts = layout.virtual
    progress = state.progress
    multiple, _ = vocabulary_rows(state, layout.tensor)
    arguments = (
        architecture_arguments(shape)
        | _training_arguments(state.settings)
        | schedule_arguments(progress)
        | {
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "virtual_pipeline_model_parallel_size": parts if parts > 1 else None,
            "num_layers_per_virtual_pipeline_stage": (
                shape.num_layers // (layout.pipeline * parts) if parts > 1 else None
            ),
            "world_size": layout.tensor * layout.pipeline,
            "data_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": False,
            "apply_query_key_layer_scaling": False,
            "data_parallel_random_init": False,
            "phase_transition_iterations": None,
            "use_distributed_optimizer": False,
            "ckpt_format": "torch",
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "iteration": progress.iteration if progress else 0,
            "consumed_train_samples": progress.consumed_samples if progress else 0,
            "consumed_valid_samples": 0,
            "skipped_train_samples": 0,
            "make_vocab_size_divisible_by": multiple,
            "true_vocab_size": state.vocab_size,
            **_tokenizer_arguments(state, tokenizer),
        }
    )
    return argparse.Namespace(**arguments)


def _training_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as arguments; Megatron's batch size schedule is one text."""
    found = {name: value for name, value in settings.items() if name != "precision"}
    if schedule := found.get("step_batch_size_schedule"):
        found["step_batch_size_schedule"] = " ".join(schedule)
    return found


def _tokenizer_arguments(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the arguments of Megatron that name the tokenizer."""
    if tokenizer is None:
        return {"tokenizer_type": state.tokenizer_type}
    size = tokenizer.describe().get("vocab_size")
    return {"tokenizer_type": tokenizer.name, **({} if size is None else {"vocab_size": size})}


def activation_notes(shape: ModelShape, *, program: str = "Megatron") -> list[str]:
    """Return a note if Megatron computes another activation than lmcore.

    Its fused kernel, lmcore's tanh approximation of GELU, needs a bias.

    Args:
        shape: Shape of the model.
        program: Name of the program that loads the checkpoint.
    """
    if shape.gated or shape.add_bias_linear or shape.model_family:
        return []
    note = (
        f"without biases {program} computes GELU exactly (`--no-bias-gelu-fusion`), lmcore its "
        "tanh approximation: losses differ slightly"
    )
    return [note]


def start_notes(state: ModelState, layout: Layout, flags: str, *, optimizer: bool) -> list[str]:
    """Return notes for the user of Megatron.

    Args:
        state: Model that was written.
        layout: Parallel layout.
        flags: Flags with which Megatron reads the format.
        optimizer: True if the state of the optimizer was written.
    """
    notes = activation_notes(state.shape) + vocabulary_notes(state, layout.tensor)
    scheduled = state.progress is not None and state.progress.schedule is not None
    if optimizer and not scheduled:
        notes.append("Megatron loads an optimizer with its schedule only, which is not known here")
    loaded = "--no-load-optim"
    if optimizer and scheduled:
        loaded = "--use-checkpoint-opt_param-scheduler"
    names = names_for(state.shape)
    flags = " ".join([flags, *(names.flags(state.shape) if names else ()), loaded])
    notes.append(f"start Megatron with `--use-checkpoint-args {flags} --no-load-rng`")
    return notes
