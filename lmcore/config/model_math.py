"""How large a model is and how much arithmetic a step takes, from its shape alone."""

from __future__ import annotations

from lmcore.config.section.model import ModelSection

__all__ = [
    "ffn_hidden_size",
    "flops_per_step",
    "head_size",
    "num_query_groups",
    "pad_vocab_size",
    "parameter_count",
]

_GATED_MULTIPLE = 64


def ffn_hidden_size(model: ModelSection) -> int:
    """Return the feed-forward width, 4 * hidden_size unless set.

    With SwiGLU, which has a third matrix, two thirds of that, down to a multiple of 64.
    """
    if model.ffn_hidden_size or not model.swiglu:
        return model.ffn_hidden_size or 4 * model.hidden_size
    return int(4 * model.hidden_size * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE


def head_size(model: ModelSection) -> int:
    """Return the channels of an attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def num_query_groups(model: ModelSection) -> int:
    """Return the heads of keys and values: without groups one for each query head."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return model.num_query_groups or 1


def pad_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Return *vocab_size* rounded up to a multiple of *divisible_by* * *tensor_parallel_size*."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def parameter_count(model: ModelSection, padded_vocab_size: int) -> int:
    """Return the exact number of parameters.

    Of a GPT-2, with f = 4h, this is 12lh^2(1 + 13/12h + (V + s)/12lh) + 2h, the published formula
    plus the final norm; of a Llama with a heads of queries and k of keys it is
    2Vh + l(h^2(2 + 2k/a) + 3hf + 2h) + h.
    """
    h, f = model.hidden_size, ffn_hidden_size(model)
    queries, keys = _attention_widths(model)
    packed, up = queries + 2 * keys, 2 * f if model.swiglu else f
    biases = model.add_bias_linear
    attention = h * packed + queries * h
    attention += packed * (biases or model.add_qkv_bias) + h * biases
    feed_forward = h * up + f * h + (up + h) * biases
    norm = h if model.normalization == "RMSNorm" else 2 * h
    rows = padded_vocab_size * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings or model.seq_length
    return rows * h + model.num_layers * (attention + feed_forward + 2 * norm) + norm


def _attention_widths(model: ModelSection) -> tuple[int, int]:
    """Return the channels of all heads of queries, and of all heads of keys."""
    width = head_size(model)
    return model.num_attention_heads * width, num_query_groups(model) * width


def flops_per_step(
    model: ModelSection, padded_vocab_size: int, global_batch_size: int, *, recompute: bool = False
) -> int:
    """Return the floating-point operations of one step, forward and backward.

    A multiply-add counts as two and a backward pass as two forward passes; attention is counted
    whole, not halved for causality.  Of a GPT-2 with f = 4h this is 72Bslh^2(1 + s/6h + V/12lh).

    Args:
        model: The shape.
        padded_vocab_size: V, as the output layer computes it.
        global_batch_size: B, samples of seq_length tokens.
        recompute: Whether to count the layers' forward pass twice: hardware instead of model
            FLOPs, 96Bslh^2(1 + s/6h + V/16lh).
    """
    h, s = model.hidden_size, model.seq_length
    queries, keys = _attention_widths(model)
    matrices = 3 if model.swiglu else 2
    layer = 2 * h * (2 * queries + 2 * keys + matrices * ffn_hidden_size(model)) + 4 * s * queries
    logits = 2 * h * padded_vocab_size
    passes = 4 if recompute else 3
    return global_batch_size * s * (passes * model.num_layers * layer + 3 * logits)
