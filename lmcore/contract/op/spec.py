"""The ops that the core declares: one line each, with the reference that is their meaning.

Shapes: B batch, S sequence, T tokens (B*S), H hidden, I inputs, O outputs, N heads, K key/value
heads, D head channels, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from lmcore.contract.op.records import OpSpec, Tolerance

__all__ = ["OP_SPECS"]

_ELEMENTWISE = {
    "float64": Tolerance(1e-12, 1e-12),
    "float32": Tolerance(2e-6, 1e-5),
    "bfloat16": Tolerance(2e-2, 2e-2),
    "float16": Tolerance(2e-3, 2e-3),
}
_REDUCTION = {
    "float64": Tolerance(1e-11, 1e-11),
    "float32": Tolerance(2e-5, 1e-4),
    "bfloat16": Tolerance(4e-2, 4e-2),
    "float16": Tolerance(4e-3, 4e-3),
}


def _spec(
    name: str,
    schema: str,
    summary: str,
    *,
    reduces: bool,
    gradients: tuple[str, ...] = (),
    attributes: tuple[str, ...] = (),
) -> OpSpec:
    return OpSpec(
        name=name,
        reference=f"lmcore.contract.op.reference:{name}",
        schema=schema,
        summary=summary,
        tolerances=_REDUCTION if reduces else _ELEMENTWISE,
        gradients=gradients,
        attributes=attributes,
    )


OP_SPECS: tuple[OpSpec, ...] = (
    _spec(
        "attention",
        "(q_BNSD, k_BKSD, v_BKSD, *, causal, dropout=0.0, mask=None) -> out_BNSD",
        "Softmax attention with the scale 1/sqrt(D); K divides N.",
        reduces=True,
        gradients=("q_BNSD", "k_BKSD", "v_BKSD"),
        attributes=(
            "head_dim",
            "num_attention_heads",
            "num_query_groups",
            "seq_length",
            "causal",
            "masked",
            "dropout",
            "compile",
            "score_bias",
            "score_bias_gradient",
        ),
    ),
    _spec(
        "layer_norm",
        "(x_BSH, weight_H, bias_H, epsilon) -> out_BSH",
        "Normalization over the last dim, with gain and offset.",
        reduces=True,
        gradients=("x_BSH", "weight_H", "bias_H"),
        attributes=("hidden_size", "compile"),
    ),
    _spec(
        "rms_norm",
        "(x_BSH, weight_H, epsilon) -> out_BSH",
        "Division by the root mean square of the last dim, with gain.",
        reduces=True,
        gradients=("x_BSH", "weight_H"),
        attributes=("hidden_size", "compile"),
    ),
    _spec(
        "linear",
        "(x_BSI, weight_OI, bias_O) -> out_BSO",
        "Projection of the last dim: x @ weight.T + bias; bias may be None.",
        reduces=True,
        gradients=("x_BSI", "weight_OI", "bias_O"),
        attributes=("in_features", "out_features", "bias", "compile"),
    ),
    _spec(
        "bias_gelu",
        "(x_BSF, bias_F) -> out_BSF",
        "GELU of x + bias, tanh form.",
        reduces=False,
        gradients=("x_BSF", "bias_F"),
        attributes=("ffn_hidden_size", "compile"),
    ),
    _spec(
        "swiglu",
        "(x_BS2F) -> out_BSF",
        "SiLU of the first half of the last dim, times the second half.",
        reduces=False,
        gradients=("x_BS2F",),
        attributes=("ffn_hidden_size", "compile"),
    ),
    _spec(
        "bias_dropout_add",
        "(x_BSH, bias_H, residual_BSH, *, dropout, training) -> out_BSH",
        "residual + dropout(x + bias); bias may be None.",
        reduces=False,
        gradients=("x_BSH", "bias_H", "residual_BSH"),
        attributes=("hidden_size", "bias", "dropout", "compile"),
    ),
    _spec(
        "scaled_masked_softmax",
        "(x_BNST, mask, scale) -> out_BNST",
        "Softmax over the last dim of x * scale, True in the mask meaning hidden; a row that is "
        "hidden entirely gives zeros.",
        reduces=True,
        gradients=("x_BNST",),
        attributes=("num_attention_heads", "seq_length", "causal", "masked", "compile"),
    ),
    _spec(
        "rotary_embedding",
        "(x_BNSD, cos_SR, sin_SR) -> out_BNSD",
        "Rotation of the first 2R channels by position, halves apart.",
        reduces=False,
        gradients=("x_BNSD",),
        attributes=("head_dim", "rotary_dim", "num_attention_heads", "seq_length", "compile"),
    ),
    _spec(
        "cross_entropy",
        "(logits_TV, target_T) -> loss_T (float32)",
        "Negative log-likelihood of each target.",
        reduces=True,
        gradients=("logits_TV",),
        attributes=("vocab_size", "compile"),
    ),
    _spec(
        "linear_cross_entropy",
        "(hidden_TH, weight_VH, target_T, loss_weight_T) -> loss (float32 scalar)",
        "Sum over tokens of loss_weight times the cross entropy of hidden @ weight.T.",
        reduces=True,
        gradients=("hidden_TH", "weight_VH"),
        attributes=("vocab_size", "hidden_size", "compile"),
    ),
    _spec(
        "adamw",
        "(params, grads, exp_avgs, exp_avg_sqs, steps, *, lr, beta1, beta2, epsilon, weight_decay)"
        " -> None, in place",
        "One AdamW step with decoupled decay; steps are float32 scalars, raised by one. A kernel"
        " may take `results` besides: three lists of tensors for the new weights and moments, while"
        " the old ones stay as they are; asynchronous saves on the host then copy nothing. It may"
        " take `copies`: for each weight None or a tensor of another dtype that gets the new weight"
        " too, so that products under autocast need no cast (`lmcore.contract.weight_copies`)."
        " And it may take `gradient_factor`: a number by which it multiplies the gradients, so that"
        " clipping needs no pass of its own.",
        reduces=False,
    ),
    _spec(
        "grad_norm",
        "(grads) -> norm (float32 scalar)",
        "Euclidean norm over all tensors.",
        reduces=True,
    ),
)
