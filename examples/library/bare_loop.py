"""A user's own training loop on the device of a plugin: fit a sine with a small network.

Try:
    python examples/library/bare_loop.py
    lmcore run --nproc-per-node 2 examples/library/bare_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmcore


def train(rt, epochs=4):
    """Train, and return the loss of each step on this rank."""
    torch.manual_seed(1)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    data = DataLoader(TensorDataset(x, torch.sin(x)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = rt.prepare(model, optimizer)
    losses, batches = [], rt.loader(data)
    for _ in range(epochs):
        for x, y in batches:
            with rt.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            rt.backward(loss)
            rt.step(optimizer, clip=1.0)
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with lmcore.start() as rt:
        losses = train(rt)
        rt.print(f"{rt.world_size} x {rt.device.type}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
