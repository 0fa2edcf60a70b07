"""How large a model is and how much arithmetic a step takes, from its shape alone."""

from __future__ import annotations

from lmcore.config.section.model import ModelSection

__all__ = ["ffn_width", "flops_per_step", "padded_vocabulary", "parameter_count"]


def ffn_width(model: ModelSection) -> int:
    """Return the feed-forward width, 4 * hidden_size unless set."""
    return model.ffn_hidden_size or 4 * model.hidden_size


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Return *vocab_size* rounded up to a multiple of *divisible_by* * *tensor_parallel_size*."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def parameter_count(model: ModelSection, padded_vocab_size: int) -> int:
    """Return the exact number of parameters of a GPT with tied embeddings and learned positions.

    With f = 4h this is 12lh^2(1 + 13/12h + (V + s)/12lh) + 2h, the published formula plus the
    final norm.
    """
    h = model.hidden_size
    f = ffn_width(model)
    positions = model.max_position_embeddings or model.seq_length
    attention = 4 * h * h + 4 * h
    feed_forward = 2 * h * f + f + h
    norms = 4 * h
    embeddings = (padded_vocab_size + positions) * h
    return embeddings + model.num_layers * (attention + feed_forward + norms) + 2 * h


def flops_per_step(
    model: ModelSection, padded_vocab_size: int, global_batch_size: int, *, recompute: bool = False
) -> int:
    """Return the floating-point operations of one step, forward and backward.

    A multiply-add counts as two and a backward pass as two forward passes; attention is counted
    whole, not halved for causality.  With f = 4h this is 72Bslh^2(1 + s/6h + V/12lh).

    Args:
        model: The shape.
        padded_vocab_size: V, as the output layer computes it.
        global_batch_size: B, samples of seq_length tokens.
        recompute: Whether to count the layers' forward pass twice: hardware instead of model
            FLOPs, 96Bslh^2(1 + s/6h + V/16lh).
    """
    h, s = model.hidden_size, model.seq_length
    layer = 2 * (4 * h * h + 2 * h * ffn_width(model)) + 4 * s * h
    logits = 2 * h * padded_vocab_size
    passes = 4 if recompute else 3
    return global_batch_size * s * (passes * model.num_layers * layer + 3 * logits)
