"""T5: an encoder, a decoder that attends to it, and a head.

With learned positions it is Megatron's, with relative ones the original of Raffel et al. 2020.
Shapes: B batch, S encoder sequence, D decoder sequence, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.block_model import BlockModel
from lmcore.families.layers.head import HeadLoss
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.layers.transformer import Attention, Block, norm_of
from lmcore.families.protocol import SourceLM, TensorParallelPlan
from lmcore.families.recompute import KEEP_ALL, Recompute
from lmcore.families.t5.block import DecoderBlock, EncoderBlock, RelativeBias
from lmcore.families.t5.cache import T5Cache
from lmcore.families.t5.family import decoder_layers, stack_shape
from lmcore.model.shape import ModelPart

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding
    from lmcore.families.t5.cache import DecoderView
    from lmcore.model.shape import ModelShape

__all__ = ["T5Model"]


class T5Model(BlockModel, SourceLM):
    """Encoder and decoder; `memory` and `hidden` return their states, `loss` the head's loss."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        recompute: Recompute = KEEP_ALL,
        *,
        masked: bool = False,
        part: ModelPart | None = None,
    ) -> None:
        """Build the model; see `Model`."""
        layers = shape.num_layers + decoder_layers(shape)
        part = part or ModelPart(tuple(range(layers)))
        super().__init__(shape, ops, recompute, masked=masked, part=part)
        held = self._held(part)
        activation: str = shape.own["t5_feed_forward"].removeprefix("gated-")
        if "token_embedding" in held:
            self.token_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        if "position_embedding" in held:
            self.position_embedding = Embedding(shape.max_position_embeddings, shape.hidden_size)
        if "encoder_bias" in held:
            self.encoder_bias = RelativeBias(shape, bidirectional=True)
        run, blocks = recompute.attention, stack_shape(shape, decoder=False)
        self.encoder = nn.ModuleDict(
            {
                str(number): EncoderBlock(
                    blocks, ops, run, masked=True, causal=False, activation=activation
                )
                for number in part.layers
                if number < shape.num_layers
            }
        )
        if "encoder_norm" in held:
            self.encoder_norm = norm_of(shape, ops)
        if "decoder_bias" in held:
            self.decoder_bias = RelativeBias(shape, bidirectional=False)
        blocks = stack_shape(shape, decoder=True)
        self.decoder = nn.ModuleDict(
            {
                str(number - shape.num_layers): DecoderBlock(
                    blocks, ops, run, masked=masked, activation=activation
                )
                for number in part.layers
                if number >= shape.num_layers
            }
        )
        if part.head:
            self.decoder_norm = norm_of(shape, ops)
            self.build_heads(ops)

    def _held(self, part: ModelPart) -> frozenset[str]:
        """Return the modules that a part has beside its layers."""
        shape, layers = self.shape, frozenset(part.layers)
        encodes, decodes = min(layers) < shape.num_layers, max(layers) >= shape.num_layers
        embeds = not layers.isdisjoint({0, shape.num_layers})  # the first of each stack
        held = {
            "token_embedding": embeds or (part.head and shape.tied),
            "position_embedding": embeds and shape.learned_positions,
            "encoder_bias": encodes and shape.relative_positions,
            "encoder_norm": shape.num_layers - 1 in layers,
            "decoder_bias": decodes and shape.relative_positions,
            **dict.fromkeys(("decoder_norm", "head", "output_embedding"), part.head),
        }
        return frozenset(name for name, has in held.items() if has)

    def holders(self, parts: Sequence[ModelPart]) -> dict[str, tuple[int, ...]]:
        """Return the parts that hold each parameter that several parts hold; see `Model`.

        Both stacks embed tokens, and every stage of a stack has the bias for distances.
        """
        of_parts = [self._held(part) for part in parts]
        found = {
            name: tuple(
                number for number, held in enumerate(of_parts) if name.partition(".")[0] in held
            )
            for name in self.table
        }
        return {name: numbers for name, numbers in found.items() if len(numbers) > 1}

    def build_heads(self, ops: OpBinding) -> None:
        """Build the head."""
        shape = self.shape
        biased = shape.own["t5_head_bias"]
        if biased:
            self.head = _HeadBias(shape.padded_vocab_size)
        if not shape.tied:
            self.output_embedding = Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.head_loss = HeadLoss(shape, ops, bias=biased)

    @property
    def layers(self) -> list[Block]:
        """Blocks of the encoder, then of the decoder."""
        return [*self.encoder_blocks, *self.decoder_blocks]

    @property
    def encoder_blocks(self) -> list[Block]:
        """Blocks of the encoder, in order."""
        return [cast("Block", block) for block in self.encoder.values()]

    @property
    def decoder_blocks(self) -> list[DecoderBlock]:
        """Blocks of the decoder, in order."""
        return [cast("DecoderBlock", block) for block in self.decoder.values()]

    @property
    def attentions(self) -> list[Attention]:
        """Attention modules of both stacks, cross-attention among them."""
        crossed: list[Attention] = [block.cross_attention for block in self.decoder_blocks]
        return [block.attention for block in self.layers] + crossed

    @property
    def head_modules(self) -> dict[str, nn.Module]:
        """Modules of the head by attribute name, without the token embedding."""
        return self.present("output_embedding", "head")

    def stage_modules(self, *, first: bool, last: bool) -> dict[str, nn.Module]:  # noqa: ARG002
        """Return embeddings, biases, norms and head: all that this part has, which is one stage."""
        names = ("token_embedding", "position_embedding", "encoder_bias", "encoder_norm")
        return self.present(*names, "decoder_bias", "decoder_norm") | self.head_modules

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""
        rows = self.token_embedding if self.shape.tied else self.output_embedding
        return rows.weight

    @property
    def head_bias(self) -> Tensor | None:
        """Bias of the head, [V], if it has one."""
        return self.head.bias if "head" in self._modules else None

    def embed(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the hidden states before the first block of a stack.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each token; None: its index in the sequence.
        """
        x_BSH: Tensor = self.token_embedding(tokens_BS)
        if self.shape.learned_positions:
            x_BSH = x_BSH + self.position_embedding(_places(tokens_BS, positions_BS))
        return functional.dropout(x_BSH, self.shape.hidden_dropout, self.training)

    def memory(
        self,
        tokens_BS: Tensor,
        padding_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the states of the encoder after its last norm, [B, S, H].

        Args:
            tokens_BS: Token ids.
            padding_BS: True at padding, which no token attends to; None: there is none.
            positions_BS: Position of each token; None: its index in the sequence.
        """
        x_BSH = self.embed(tokens_BS, positions_BS)
        mask = self._encoder_mask(tokens_BS, padding_BS, positions_BS)
        x_BSH = self.run_layers(x_BSH, self.encoder_blocks, mask_B1SS=mask)
        return self.encoder_norm(x_BSH)  # type: ignore[no-any-return]

    def hidden(
        self,
        decoder_tokens_BD: Tensor,
        memory_BSH: Tensor,
        padding_BS: Tensor | None = None,
        positions_BD: Tensor | None = None,
    ) -> Tensor:
        """Return the states of the decoder before the head, [B, D, H].

        Args:
            decoder_tokens_BD: Token ids.
            memory_BSH: Result of `memory`.
            padding_BS: Padding of the encoder; see `memory`.
            positions_BD: Position of each token; None: its index in the sequence.
        """
        x_BDH = self.embed(decoder_tokens_BD, positions_BD)
        given = self._decoder_masks(decoder_tokens_BD, padding_BS, positions_BD)
        x_BDH = self.run_layers(x_BDH, self.decoder_blocks, memory_BTH=memory_BSH, **given)
        return self._before_head(x_BDH)

    def forward(self, tokens_BS: Tensor, cache: DecoderView | None = None) -> Tensor:
        """Return the states of the decoder before the head for tokens after those in a cache.

        Args:
            tokens_BS: Token ids of the decoder.
            cache: View of a cache with the source of each sequence; extended in place.
        """
        assert cache is not None, "a decoder with an encoder needs a source"
        assert cache.mask_B11T is None or self.masked, "attention was bound without a mask"
        x_BSH, mask = self.embed(tokens_BS, cache.positions), cache.mask_B11T
        if self.shape.relative_positions:
            mask = self.decoder_bias.next_addend(cache.positions, cache.num_keys)
        memory_mask = cache.memory_mask_B11T
        if memory_mask is not None:
            memory_mask = memory_mask.expand(-1, 1, tokens_BS.shape[1], -1)
        layers = zip(self.decoder_blocks, cache.layers, cache.memory, strict=True)
        for block, layer_cache, keys in layers:
            x_BSH = block.decode(x_BSH, layer_cache, mask, keys, memory_mask)
        return self._before_head(x_BSH)

    def new_cache(self, dtype: torch.dtype) -> T5Cache:
        """Return an empty cache on the model's device."""
        return T5Cache(
            self.shape, self.memory, self.decoder_blocks, device=self.device, dtype=dtype
        )

    def _before_head(self, x_BDH: Tensor) -> Tensor:
        out_BDH: Tensor = self.decoder_norm(x_BDH)
        scaled = self.shape.own["t5_scaled_head"]
        return out_BDH * self.shape.hidden_size**-0.5 if scaled else out_BDH

    def logits(self, hidden_BDH: Tensor) -> Tensor:
        """Return the logits of the padded vocabulary, [B, D, V].

        Args:
            hidden_BDH: Result of `hidden`.
        """
        if self.head_projection is None:
            return functional.linear(hidden_BDH, self.head_weight, self.head_bias)
        logits_BDV = self.head_projection(hidden_BDH)
        return logits_BDV if self.head_bias is None else logits_BDV + self.head_bias

    def outputs(self, tokens_BS: Tensor, positions_BS: Tensor) -> list[Tensor]:
        """Return the logits of tokens, which are both the encoder's and the decoder's."""
        memory_BSH = self.memory(tokens_BS, None, positions_BS)
        hidden_BSH = self.hidden(tokens_BS.flip(1), memory_BSH, None, positions_BS)
        return [self.logits(hidden_BSH)]

    def loss(self, **batch: Tensor) -> Tensor:
        """Return the sum over the decoder's tokens of loss weight times cross entropy.

        Args:
            batch: Tensors by the names of the family's batch:

                - tokens_BS: token ids of the encoder;
                - padding_BS: True at padding;
                - decoder_tokens_BD: token ids of the decoder;
                - targets_BD: next token of each;
                - loss_weight_BD: weight of each; 0 at padding.
        """
        padding_BS = batch.get("padding_BS")
        memory_BSH = self.memory(batch["tokens_BS"], padding_BS)
        hidden_BDH = self.hidden(batch["decoder_tokens_BD"], memory_BSH, padding_BS)
        return self.losses_of(hidden_BDH, batch)

    def losses_of(self, hidden_BDH: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of the decoder's states before the head; see `loss`."""
        return self.head_loss(
            hidden_BDH.flatten(0, 1),
            self.head_weight,
            batch["targets_BD"].flatten(),
            batch["loss_weight_BD"].flatten(),
            self.head_bias,
        )

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model: all stacks are split as in GPT."""
        crossed = [block.cross_attention for block in self.decoder_blocks]
        inputs: list[Linear] = [one for each in crossed for one in (each.query, each.key_value)]
        embeds = not frozenset(self.part.layers).isdisjoint({0, self.shape.num_layers})
        learned = "position_embedding" in self._modules
        return TensorParallelPlan(
            column=[*self.column_linears(), *inputs],
            row=[*self.row_linears(), *(each.output for each in crossed)],
            token_embedding=self.token_embedding if embeds else None,
            replicated_embeddings=[self.position_embedding] if learned else [],
            head_norm=self.decoder_norm if self.part.head else None,
        )

    def run_stage(
        self,
        hidden_BSH: Tensor | tuple[Tensor, Tensor] | None,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Any:
        """Return the states after a pipeline stage, which has blocks of one stack; see `Model`."""
        tokens_BD, padding_BS = batch.get("decoder_tokens_BD"), batch.get("padding_BS")
        if tokens_BD is None:
            assert isinstance(hidden_BSH, Tensor), "without a decoder's tokens there are states"
            return self._run_alone(hidden_BSH, batch, layers)
        if not isinstance(layers[0], DecoderBlock):
            tokens_BS = batch["tokens_BS"]
            x_BSH = self.embed(tokens_BS) if hidden_BSH is None else hidden_BSH
            assert isinstance(x_BSH, Tensor), "the encoder's stages have one stack's states"
            mask = self._encoder_mask(tokens_BS, padding_BS, None)
            x_BSH = self.run_layers(x_BSH, layers, mask_B1SS=mask)
            if "encoder_norm" not in self._modules:
                return x_BSH
            memory: Tensor = self.encoder_norm(x_BSH)
            return memory.to(x_BSH.dtype)  # that the next stage waits for
        assert hidden_BSH is not None, "the decoder's stages follow the encoder's"
        if isinstance(hidden_BSH, Tensor):
            hidden_BSH = (hidden_BSH, self.embed(tokens_BD))
        memory_BSH, x_BDH = hidden_BSH
        given = self._decoder_masks(tokens_BD, padding_BS, None)
        x_BDH = self.run_layers(x_BDH, layers, memory_BTH=memory_BSH, **given)
        if last:
            return self.losses_of(self._before_head(x_BDH), batch)
        return memory_BSH, x_BDH

    def _run_alone(
        self,
        hidden_BSH: Tensor,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
    ) -> Tensor:
        """Return the hidden states after some blocks of one stack, to see their products.

        The states of the encoder are the hidden states themselves; distances have no bias, as its
        table may have no memory.
        """
        given: dict[str, Any] = {}
        if self.shape.relative_positions:
            length = batch["tokens_BS"].shape[1]
            given["mask_B1SS"] = torch.zeros(1, 1, length, length, device=hidden_BSH.device)
        if isinstance(layers[0], DecoderBlock):
            given["memory_BTH"] = hidden_BSH
        return self.run_layers(hidden_BSH, layers, **given)

    def _encoder_mask(
        self, tokens_BS: Tensor, padding_BS: Tensor | None, positions_BS: Tensor | None
    ) -> Tensor | None:
        """Return the mask of the encoder's self-attention; None if it has no argument for one."""
        if self.shape.relative_positions:
            return self.encoder_bias.addend(_places(tokens_BS, positions_BS), padding_BS)
        if padding_BS is None:
            return None
        return padding_BS[:, None, None, :].expand(-1, 1, padding_BS.shape[1], -1)

    def _decoder_masks(
        self, tokens_BD: Tensor, padding_BS: Tensor | None, positions_BD: Tensor | None
    ) -> dict[str, Any]:
        """Return the masks of a decoder's block by argument.

        Padding of the decoder is at the end, where causal attention hides it.
        """
        given: dict[str, Any] = {}
        if self.shape.relative_positions:
            given["mask_B1SS"] = self.decoder_bias.addend(_places(tokens_BD, positions_BD))
        if padding_BS is not None:
            size = (-1, 1, tokens_BD.shape[1], -1)
            given["memory_mask_B1ST"] = padding_BS[:, None, None, :].expand(size)
        return given


class _HeadBias(nn.Module):
    """Bias of the head for each token."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(rows))


def _places(tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
    if positions_BS is not None:
        return positions_BS
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
