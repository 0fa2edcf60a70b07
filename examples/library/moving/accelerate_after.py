"""Classify spirals: `accelerate_before.py` with Accelerate, `accelerate_after.py` with lmcore."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmcore


def spirals(count):
    """Return points of two spirals, [count, 2], and the spiral of each."""
    kind = torch.arange(count) % 2
    angle = torch.rand(count) * 3 + 1
    turned = angle + kind * torch.pi
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1)
    return TensorDataset(points / 4 + torch.randn(count, 2) * 0.02, kind)


def train(accelerator, epochs=8, folder="runs/spirals"):
    """Train, and return the loss of each micro-batch on this rank."""
    torch.manual_seed(1)
    batches = DataLoader(spirals(2048), batch_size=32, shuffle=True)
    tests = DataLoader(spirals(256), batch_size=64)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches, tests = accelerator.loader(batches), accelerator.loader(tests)
    losses = []
    for epoch in range(epochs):
        model.train()
        for number, (points, kind) in enumerate(batches, 1):
            with accelerator.accumulate(4):
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(model(points), kind)
                accelerator.backward(loss)
                accelerator.step(optimizer, clip=1.0)
            losses.append(loss.item())
            if number % 16 == 0:
                accelerator.print(f"epoch {epoch}, batch {number}: loss {loss.item():.3f}")
        schedule.step()
        model.eval()
        right = 0
        with torch.no_grad(), accelerator.autocast():
            for points, kind in tests:
                is_right = model(points).argmax(dim=1) == kind
                right += accelerator.gather_for_metrics(is_right).sum().item()
        accelerator.print(f"epoch {epoch}: {right / 256:.0%} of the tests are right")
        accelerator.save(folder, model=model, optimizer=optimizer)
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    with lmcore.start(precision="bf16") as accelerator:
        train(accelerator)
