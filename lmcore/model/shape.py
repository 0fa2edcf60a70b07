"""`ModelShape`: the numbers a model is built from, all of them known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.config.resolve import RunPlan

__all__ = ["ModelShape"]


@dataclass(frozen=True)
class ModelShape:
    """Shape and initialisation of a GPT; the words are those of the `model` section."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    padded_vocab_size: int
    layernorm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_plan(cls, plan: RunPlan) -> ModelShape:
        """Return the shape that a resolved plan asks for."""
        model = plan.config.model
        assert model.ffn_hidden_size is not None
        assert model.max_position_embeddings is not None
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            ffn_hidden_size=model.ffn_hidden_size,
            max_position_embeddings=model.max_position_embeddings,
            padded_vocab_size=plan.padded_vocab_size,
            layernorm_epsilon=model.layernorm_epsilon,
            init_method_std=model.init_method_std,
            attention_dropout=model.attention_dropout,
            hidden_dropout=model.hidden_dropout,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, for a checkpoint's manifest."""
        return asdict(self)
