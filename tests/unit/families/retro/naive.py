"""Retro's logits token by token, in float64: the definition, without any batching of chunks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.families.retro.family import reading_layers
from lmcore.families.retro.model import Retro


class NaiveRetro:
    """Pass over one sequence; the model has biases and learned positions.

    Written from section 2 of Borgeaud et al. 2022.
    """

    def __init__(self, model: Retro, weights: dict[str, Tensor]) -> None:
        """Take the sizes of a model, and its weights by name."""
        self.shape, self.weights = model.shape, weights

    def norm(self, name: str, x_H: Tensor) -> Tensor:
        gain, offset = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x_H, x_H.shape, gain, offset, self.shape.layernorm_epsilon)

    def project(self, name: str, x_H: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x_H + self.weights[f"{name}.bias"]

    def attend(self, name: str, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Return the attention of one token to some others, head by head."""
        size, out = self.shape.head_dim, []
        for head in range(self.shape.num_attention_heads):
            part = slice(head * size, (head + 1) * size)
            scores = torch.stack([q[part] @ key[part] for key in keys]) / math.sqrt(size)
            weights = scores.softmax(0)
            out.append(sum(w * value[part] for w, value in zip(weights, values, strict=True)))
        joined = torch.cat(out)
        return self.weights[f"{name}.output.weight"] @ joined + self.weights[f"{name}.output_bias"]

    def self_attention(self, name: str, x: list[Tensor], seen: list[list[int]]) -> list[Tensor]:
        packed = [
            self.project(f"{name}.attention.qkv", self.norm(f"{name}.attention_norm", one))
            for one in x
        ]
        parts = [one.chunk(3) for one in packed]
        found = []
        for i, one in enumerate(x):
            if not seen[i]:
                found.append(one + self.weights[f"{name}.attention.output_bias"])
                continue
            keys, values = ([parts[j][k] for j in seen[i]] for k in (1, 2))
            found.append(one + self.attend(f"{name}.attention", parts[i][0], keys, values))
        return found

    def cross_attention(self, name: str, normal_H: Tensor, states: list[Tensor]) -> Tensor:
        q = self.project(f"{name}.cross_attention.query", normal_H)
        pairs = [self.project(f"{name}.cross_attention.key_value", one).chunk(2) for one in states]
        keys, values = [one for one, _ in pairs], [one for _, one in pairs]
        return self.attend(f"{name}.cross_attention", q, keys, values)

    def feed(self, name: str, x_H: Tensor) -> Tensor:
        weights, normal = self.weights, self.norm(f"{name}.feed_forward_norm", x_H)
        up = weights[f"{name}.feed_forward.up.weight"] @ normal
        wide = functional.gelu(up + weights[f"{name}.feed_forward.up_bias"], approximate="tanh")
        down = weights[f"{name}.feed_forward.down.weight"] @ wide
        return x_H + down + weights[f"{name}.feed_forward.down_bias"]

    def embed(self, tokens: Tensor) -> list[Tensor]:
        rows = self.weights["token_embedding.weight"], self.weights["position_embedding.weight"]
        return [rows[0][token] + rows[1][place] for place, token in enumerate(tokens)]

    def encoded(self, tokens: Tensor, padding: Tensor, chunk: list[Tensor]) -> list[Tensor]:
        """Return the states of one neighbour that are not padding."""
        x = self.embed(tokens)
        kept = [i for i in range(len(x)) if not padding[i]]
        for layer in range(self.shape.own["retro_encoder_layers"]):
            name = f"encoder.{layer}"
            x = self.self_attention(name, x, [kept] * len(x))
            if layer == 0:
                x = [
                    one
                    + self.cross_attention(
                        name, self.norm(f"{name}.cross_attention_norm", one), chunk
                    )
                    for one in x
                ]
            x = [self.feed(name, one) for one in x]
        return [x[i] for i in kept]

    def logits(self, tokens_S: Tensor, neighbors_LKR: Tensor, padding_LKR: Tensor) -> Tensor:
        """Return the logits of a sequence, [S, V]."""
        own, reading = self.shape.own, reading_layers(self.shape)
        size, x = own["retro_chunk_length"], self.embed(tokens_S)
        memory: list[list[Tensor]] = []
        for layer in range(self.shape.num_layers):
            name = f"blocks.{layer}"
            x = self.self_attention(name, x, [list(range(i + 1)) for i in range(len(x))])
            if layer in reading:
                normal = [self.norm(f"{name}.cross_attention_norm", one) for one in x]
                for chunk in range(len(x) // size) if layer == reading[0] else ():
                    states: list[Tensor] = []
                    own_states = normal[chunk * size : (chunk + 1) * size]
                    for pair in zip(neighbors_LKR[chunk], padding_LKR[chunk], strict=True):
                        states += self.encoded(*pair, own_states)
                    memory.append(states)
                for i in range(size - 1, len(x)):
                    states = memory[(i + 1) // size - 1]
                    if states:
                        branch = self.cross_attention(name, normal[i], states)
                        x[i] = x[i] + own["retro_attention_gate"] * branch
            x = [self.feed(name, one) for one in x]
        head = self.weights["token_embedding.weight"]
        return torch.stack([head @ self.norm("final_norm", one) for one in x])
