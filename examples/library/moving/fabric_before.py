"""Classify spirals: `fabric_before.py` with Lightning Fabric, `fabric_after.py` with lmcore."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(count):
    """Return points of two spirals, [count, 2], and the spiral of each."""
    kind = torch.arange(count) % 2
    angle = torch.rand(count) * 3 + 1
    turned = angle + kind * torch.pi
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1)
    return TensorDataset(points / 4 + torch.randn(count, 2) * 0.02, kind)


def train(fabric, epochs=8, folder="runs/spirals"):
    """Train, and return the loss of each micro-batch on this rank."""
    torch.manual_seed(1)
    batches = DataLoader(spirals(2048), batch_size=32, shuffle=True)
    tests = DataLoader(spirals(256), batch_size=64)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    model, optimizer = fabric.setup(model, optimizer)
    batches, tests = fabric.setup_dataloaders(batches, tests)
    losses = []
    for epoch in range(epochs):
        model.train()
        for number, (points, kind) in enumerate(batches, 1):
            with fabric.no_backward_sync(model, enabled=number % 4 != 0):
                with fabric.autocast():
                    loss = nn.functional.cross_entropy(model(points), kind)
                fabric.backward(loss / 4)
            if number % 4 == 0:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if number % 16 == 0:
                fabric.print(f"epoch {epoch}, batch {number}: loss {loss.item():.3f}")
        schedule.step()
        model.eval()
        with torch.no_grad(), fabric.autocast():
            right = [(model(points).argmax(dim=1) == kind).float().mean() for points, kind in tests]
        share = fabric.all_reduce(torch.stack(right).mean())
        fabric.print(f"epoch {epoch}: {share.item():.0%} of the tests are right")
        fabric.save(f"{folder}/epoch_{epoch}", {"model": model, "optimizer": optimizer})
    fabric.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    fabric = Fabric(precision="bf16-mixed")
    fabric.launch(train)
