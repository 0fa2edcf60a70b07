"""A GPT on characters in plain torch, in the manner of nanoGPT, with lmcore around the loop.

Try:
    python examples/library/character_gpt.py --text FILE --steps 300
    lmcore run --nproc-per-node 2 examples/library/character_gpt.py --text FILE
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import lmcore


class Block(nn.Module):
    """A transformer layer: attention and a feed-forward network, each after a LayerNorm."""

    def __init__(self, width, heads):
        """Build it for *width* channels."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return x after the layer, [batch, time, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT whose embedding is its head, too."""

    def __init__(self, vocabulary, length, width=96, heads=4, layers=3):
        """Build it with small random weights."""
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 / math.sqrt(2 * layers) if "out" in name or "down" in name else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens):
        """Return the logits of each next token, [batch, time, vocabulary]."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


class Windows(Dataset):
    """Windows of a text, as token numbers."""

    def __init__(self, tokens, length):
        """Cut *tokens* into windows of *length* + 1."""
        self.tokens, self.length = tokens, length

    def __len__(self):
        """Return the number of windows."""
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        """Return the tokens of a window, and the tokens after them."""
        window = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]


def train(rt, text, steps=20, length=64, accumulate=2):
    """Train, and return the loss of each micro-batch on this rank, and the model."""
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    tokens = torch.tensor([number[character] for character in text])
    torch.manual_seed(1)
    model = GPT(len(characters), length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)
    model, optimizer = rt.prepare(model, optimizer)
    batches = rt.loader(DataLoader(Windows(tokens, length), batch_size=8, shuffle=True))
    losses = []
    while rt.updates < steps:
        for x, y in batches:
            with rt.accumulate(accumulate):
                with rt.autocast():
                    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                rt.backward(loss)
                rt.step(optimizer, clip=1.0)
            losses.append(loss.item())
            if rt.updated:
                schedule.step()
            if rt.updates == steps:
                break
    return losses, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="directory for the checkpoint")
    arguments = parser.parse_args()
    with lmcore.start() as rt:
        losses, model = train(rt, arguments.text.read_text(encoding="utf-8"), arguments.steps)
        rt.print(f"{rt.updates} steps on {rt.device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        if arguments.save:
            rt.print("saved", rt.save(arguments.save, model=model))
