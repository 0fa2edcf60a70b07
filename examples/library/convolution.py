"""A convolution network that separates circles from squares, on images that are generated here.

Try:
    python examples/library/convolution.py
    lmcore run --nproc-per-node 2 examples/library/convolution.py --zero-stage 1
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lmcore

SIDE = 24


class Shapes(Dataset):
    """Images of a circle or a square with noise, and 0 or 1."""

    def __init__(self, count, seed):
        """Draw *count* images."""
        self.count, self.seed = count, seed
        rows = torch.arange(SIDE).float()
        self.y, self.x = torch.meshgrid(rows, rows, indexing="ij")

    def __len__(self):
        """Return the number of images."""
        return self.count

    def __getitem__(self, index):
        """Return an image, [1, side, side], and its class."""
        generator = torch.Generator().manual_seed(self.seed + index)
        radius, row, column = (torch.rand(3, generator=generator) * 4 + 6).tolist()
        y, x = self.y - row - 4, self.x - column - 4
        is_square = index % 2
        distance = torch.maximum(y.abs(), x.abs()) * 1.1 if is_square else (y**2 + x**2).sqrt()
        image = (distance < radius).float() + 0.1 * torch.randn(SIDE, SIDE, generator=generator)
        return image.unsqueeze(0), is_square


def make_model():
    """Return the network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 8) ** 2, 2),
    )


def train(rt, epochs=3):
    """Train, and return the loss of each step on this rank."""
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    model, optimizer = rt.prepare(model, optimizer)
    images = rt.loader(DataLoader(Shapes(512, seed=7), batch_size=32, shuffle=True))
    losses = []
    for _ in range(epochs):
        model.train()
        for image, kind in images:
            with rt.autocast():
                loss = nn.functional.cross_entropy(model(image), kind)
            rt.backward(loss)
            rt.step(optimizer)
            losses.append(loss.item())
        schedule.step()
    return losses, model


def accuracy(rt, model):
    """Return the share of right classes, over all ranks."""
    model.eval()
    images = rt.loader(DataLoader(Shapes(128, seed=100_000), batch_size=32))
    right = seen = 0
    with torch.no_grad():
        for image, kind in images:
            with rt.autocast():
                guess = model(image).argmax(dim=1)
            is_right = rt.gather_for_metrics(guess == kind)
            right, seen = right + is_right.sum().item(), seen + len(is_right)
    return right / seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--zero-stage", type=int, default=0)
    with lmcore.start(zero_stage=parser.parse_args().zero_stage) as rt:
        losses, model = train(rt)
        share = accuracy(rt, model)
        rt.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {share:.0%} of unseen images right")
