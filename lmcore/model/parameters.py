"""Names and shapes of a model's parameters, without building the model."""

from __future__ import annotations

from lmcore.model.shape import ModelShape

__all__ = ["ROW_FOR_EACH_TOKEN", "has_known_parameters", "parameter_shapes"]

ROW_FOR_EACH_TOKEN = ("token_embedding.weight", "output_embedding.weight")
"""Names of the parameters with a row for each token."""
_FAMILIES = {"GPT", "Llama"}


def has_known_parameters(shape: ModelShape) -> bool:
    """Return True if `parameter_shapes` knows the model's family."""
    return shape.family in _FAMILIES


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a GPT or Llama model, by name, in order.

    Args:
        shape: Shape of the model.
    """
    hidden, width = shape.hidden_size, shape.ffn_hidden_size
    packed = shape.attention_size + 2 * shape.key_size
    up = 2 * width if shape.swiglu else width
    found: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (shape.padded_vocab_size, hidden)
    }
    if shape.learned_positions:
        found["position_embedding.weight"] = (shape.max_position_embeddings, hidden)

    def add_norm(name: str) -> None:
        found[f"{name}.weight"] = (hidden,)
        if shape.normalization == "LayerNorm":
            found[f"{name}.bias"] = (hidden,)

    for layer in range(shape.num_layers):
        block = f"blocks.{layer}"
        add_norm(f"{block}.attention_norm")
        found[f"{block}.attention.qkv.weight"] = (packed, hidden)
        if shape.qkv_bias:
            found[f"{block}.attention.qkv.bias"] = (packed,)
        found[f"{block}.attention.output.weight"] = (hidden, shape.attention_size)
        if shape.add_bias_linear:
            found[f"{block}.attention.output_bias"] = (hidden,)
        add_norm(f"{block}.feed_forward_norm")
        found[f"{block}.feed_forward.up.weight"] = (up, hidden)
        if shape.add_bias_linear:
            found[f"{block}.feed_forward.{'up.bias' if shape.swiglu else 'up_bias'}"] = (up,)
        found[f"{block}.feed_forward.down.weight"] = (hidden, width)
        if shape.add_bias_linear:
            found[f"{block}.feed_forward.down_bias"] = (hidden,)
    add_norm("final_norm")
    if not shape.tied:
        found["output_embedding.weight"] = (shape.padded_vocab_size, hidden)
    return found
