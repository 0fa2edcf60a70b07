"""Derived widths, parameters and FLOPs of a model, from its shape alone."""

from __future__ import annotations

from lmcore.config.section.model import ModelSection

__all__ = [
    "USUAL_MULTIPLE",
    "ffn_hidden_size",
    "flops_per_step",
    "head_size",
    "num_query_groups",
    "pad_vocab_size",
    "parameter_count",
    "vocabulary_multiple",
]

_GATED_MULTIPLE = 64
USUAL_MULTIPLE = 128
"""Default of `--make-vocab-size-divisible-by`."""


def ffn_hidden_size(model: ModelSection) -> int:
    """Return the width of the feed-forward layer, 4 * hidden_size by default.

    The default with SwiGLU, which has a third matrix, is two thirds of that, rounded down to a
    multiple of 64.
    """
    if model.ffn_hidden_size or not model.swiglu:
        return model.ffn_hidden_size or 4 * model.hidden_size
    return int(4 * model.hidden_size * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE


def head_size(model: ModelSection) -> int:
    """Return the number of channels of an attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def num_query_groups(model: ModelSection) -> int:
    """Return the number of key and value heads; without groups one for each query head."""
    if not model.group_query_attention:
        return model.num_attention_heads
    return model.num_query_groups or 1


def pad_vocab_size(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Return *vocab_size* rounded up to a multiple of *divisible_by* * *tensor_parallel_size*."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def vocabulary_multiple(vocab_size: int, rows: int, *, tensor_parallel_size: int = 1) -> int:
    """Return the `divisible_by` with which `pad_vocab_size` gives *rows*; the usual one if it does.

    Args:
        vocab_size: Number of tokens, at most *rows*.
        rows: Rows of the embedding, which the ranks can divide.
        tensor_parallel_size: Number of ranks of tensor parallelism.
    """
    largest = rows // tensor_parallel_size
    smaller = [USUAL_MULTIPLE >> shift for shift in range(USUAL_MULTIPLE.bit_length())]
    larger = [USUAL_MULTIPLE << shift for shift in range(1, largest.bit_length())]
    candidates: list[int] = [*smaller, *range(USUAL_MULTIPLE, 0, -1), *larger]
    for multiple in candidates:
        padded = pad_vocab_size(
            vocab_size, divisible_by=multiple, tensor_parallel_size=tensor_parallel_size
        )
        if padded == rows:
            return multiple
    return largest  # which gives the rows for any vocabulary


def parameter_count(model: ModelSection, padded_vocab_size: int) -> int:
    """Return the exact number of parameters.

    For GPT-2 with f = 4h this is 12lh^2(1 + 13/12h + (V + s)/12lh) + 2h; for Llama with a query
    heads and k key heads 2Vh + l(h^2(2 + 2k/a) + 3hf + 2h) + h.

    Args:
        model: Shape of the model.
        padded_vocab_size: Rows of the embedding, V.

    Source: Narayanan et al. 2021, plus the final norm.
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
    """Return the channels of all query heads together, and of all key heads."""
    width = head_size(model)
    return model.num_attention_heads * width, num_query_groups(model) * width


def flops_per_step(
    model: ModelSection, padded_vocab_size: int, global_batch_size: int, *, recompute: bool = False
) -> int:
    """Return the floating-point operations of one step, forward and backward.

    A multiply-add counts as two and a backward pass as two forward passes; causal attention is
    not counted as half.  For GPT-2 with f = 4h this is 72Bslh^2(1 + s/6h + V/12lh).

    Args:
        model: Shape of the model.
        padded_vocab_size: Columns of the output layer, V.
        global_batch_size: Samples of seq_length tokens in the step, B.
        recompute: True to count the forward pass of the layers twice: hardware FLOPs instead of
            model FLOPs, 96Bslh^2(1 + s/6h + V/16lh).

    Source: Narayanan et al. 2021.
    """
    h, s = model.hidden_size, model.seq_length
    queries, keys = _attention_widths(model)
    matrices = 3 if model.swiglu else 2
    layer = 2 * h * (2 * queries + 2 * keys + matrices * ffn_hidden_size(model)) + 4 * s * queries
    logits = 2 * h * padded_vocab_size
    passes = 4 if recompute else 3
    return global_batch_size * s * (passes * model.num_layers * layer + 3 * logits)
