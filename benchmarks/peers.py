"""The peers of the benchmarks, each as its own documentation would have it written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from train_step import Shape


def _batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    size = (shape.micro_batch_size, shape.seq_length + 1)
    ids = torch.randint(0, min(50257, shape.vocab_size), size, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


def _autocast(precision: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def transformers_step(
    shape: Shape, *, compiled: bool, threads: int, precision: str = "fp32"
) -> Callable[[], float]:
    """Return a step of the `transformers` GPT-2, Llama, BERT or T5, with its own loss."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batch = _MODELS[shape.family](shape)
    model.train()
    run = torch.compile(model) if compiled else model
    optimizer = _adamw(model)

    def take() -> float:
        optimizer.zero_grad()
        with _autocast(precision):
            loss = run(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return take


def _gpt2(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_length,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    tokens, _ = _batch(shape)
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def _llama(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return Llama with shared keys, and separate weights of embedding and head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_groups,
        max_position_embeddings=shape.seq_length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    tokens, _ = _batch(shape)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def _bert(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return BERT with both heads, and a batch with 15% of the tokens masked."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.hidden_size,
        max_position_embeddings=shape.seq_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    tokens, _ = _batch(shape)
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    second_half = torch.arange(shape.seq_length) >= shape.seq_length // 2
    return BertForPreTraining(config), {
        "input_ids": tokens.masked_fill(masked, 4),
        "token_type_ids": second_half.long().expand_as(tokens),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~masked, -100),
        "next_sentence_label": torch.arange(len(tokens)) % 2,
    }


def _t5(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return T5 with relative positions and ReLU, and a batch without padding."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.num_heads,
        d_ff=4 * shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens, _ = _batch(shape)
    generator = torch.Generator().manual_seed(1)
    size = (shape.micro_batch_size, shape.decoder_length)
    answers = torch.randint(0, min(50257, shape.vocab_size), size, generator=generator)
    return T5ForConditionalGeneration(config), {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": answers,
    }


_MODELS = {"gpt": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5}


def megatron_step(
    shape: Shape, *, compiled: bool, threads: int, precision: str = "fp32"
) -> Callable[[], float]:
    """Return a step of megatron-core's GPTModel with the local layer spec.

    It asks for its accelerator by name; the replacement on a CPU is patched in below.
    """
    if compiled:
        raise ImportError("megatron-core's own modules are not compiled here")
    if shape.family != "gpt":
        raise ImportError("megatron-core is measured with GPT alone")
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add = lambda name, seed: None  # type: ignore[method-assign]

    import contextlib

    tracker.fork = lambda name="": contextlib.nullcontext()  # type: ignore[method-assign]
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    ).train()
    optimizer = _adamw(model)
    tokens, targets = _batch(shape)
    positions = torch.arange(shape.seq_length).expand_as(tokens)
    mask = torch.ones(1, 1, shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)

    def take() -> float:
        optimizer.zero_grad()
        with _autocast(precision):
            loss = model(tokens, positions, mask, labels=targets).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return take
