"""The families GPT and Llama: causal language models, which differ by settings.  Torch-free."""

from __future__ import annotations

from dataclasses import replace

from lmcore.families.layers.parameters import block_rows, norm_rows
from lmcore.model.family import Body, Family, FamilySettings, ForwardFlops, Loss, block_flops
from lmcore.model.parameters import Init, Parameter, Split
from lmcore.model.shape import ModelShape

__all__ = ["GPT", "LLAMA", "forward_flops", "parameters"]


def parameters(shape: ModelShape) -> list[Parameter]:
    """Return the table of parameters: embeddings, blocks, final norm and head."""
    rows = (shape.padded_vocab_size, shape.hidden_size)
    usual = Init(std=shape.init_method_std)
    table = [Parameter("token_embedding.weight", rows, usual, Split(0), rows_are_tokens=True)]
    if shape.embed_layernorm:
        table += norm_rows("embedding_norm", replace(shape, normalization="LayerNorm"))
    if shape.learned_positions:
        positions = (shape.max_position_embeddings, shape.hidden_size)
        table.append(Parameter("position_embedding.weight", positions, usual))
    for layer in range(shape.num_layers):
        table += block_rows(f"blocks.{layer}", shape)
    table += norm_rows("final_norm", shape)
    tied_to = "token_embedding.weight" if shape.tied else ""
    head = Parameter("output_embedding.weight", rows, usual, Split(0), True, tied_to)  # noqa: FBT003
    return [*table, head]


def forward_flops(shape: ModelShape, seq_length: int) -> ForwardFlops:
    """Return the floating-point operations of the forward pass of a sample; see `block_flops`."""
    head = seq_length * 2 * shape.hidden_size * shape.padded_vocab_size
    return ForwardFlops(shape.num_layers * block_flops(shape, seq_length), head)


def _is_llama(settings: FamilySettings) -> bool:
    rotary = settings.position_embedding_type == "rope"
    return settings.normalization == "RMSNorm" and settings.swiglu and rotary


GPT = Family(
    name="GPT",
    matches=lambda _settings: True,
    parameters=parameters,
    forward_flops=forward_flops,
    batch={
        "tokens_BS": "BS",
        "targets_BS": "BS",
        "loss_weight_BS": "BS",
        "positions_BS": "BS",
        "documents_BS": "BS",
    },
    losses=(Loss("lm loss", "loss_weight_BS"),),
    optional=frozenset({"positions_BS", "documents_BS"}),
    targets="targets_BS",
    model="lmcore.families.gpt.model:GPT",
    samples="lmcore.families.gpt.samples:samples",
    names={
        "huggingface": "lmcore.families.gpt.huggingface:ARCHITECTURES",
        "megatron": "lmcore.families.gpt.megatron:NAMES",
    },
    body=Body(inputs=("tokens_BS",), heads=frozenset({"output_embedding"})),
    every_position_is_a_target=True,
    positions=("learned_absolute", "rope", "alibi", "none"),
)
LLAMA = replace(GPT, name="Llama", matches=_is_llama, positions=("rope",))
