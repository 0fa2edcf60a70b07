"""Damage from a seed: no wrong weights, no hang, no traceback, nothing passed over in silence."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.checkpoint import load_checkpoint, newest_verified, save_checkpoint, survey
from lmcore.checkpoint.manifest import _checksum
from lmcore.errors import LmcoreError

SECONDS = 20
"""Time after which a case counts as a hang."""


def state(iteration: int) -> dict[str, torch.Tensor]:
    """Return tensors whose values are a function of the iteration."""
    generator = torch.Generator().manual_seed(iteration)
    shapes = {"model.a": (40, 30), "model.b": (7,), "optimizer.a": (1200,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of iterations 7 and 14."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    for iteration in (7, 14):
        meta = {"counters": {"iteration": iteration, "consumed_samples": 8 * iteration}}
        save_checkpoint(folder, iteration, state(iteration), meta, model_shape={"num_layers": 2})
    return folder


def flip(path: Path, draw: random.Random) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Remove bytes at the end."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def append(path: Path, draw: random.Random) -> None:
    """Add bytes at the end."""
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 5000)))


def blank(path: Path, draw: random.Random) -> None:
    """Write zeros over a block."""
    content = bytearray(path.read_bytes())
    first = draw.randrange(len(content))
    length = min(draw.randint(1, 4096), len(content) - first)
    content[first : first + length] = bytes(length)
    path.write_bytes(content)


def swap(path: Path, draw: random.Random) -> None:
    """Exchange two blocks."""
    content = path.read_bytes()
    middle = draw.randint(1, len(content) - 1)
    path.write_bytes(content[middle:] + content[:middle])


def remove(path: Path, _draw: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def other_kind(path: Path, draw: random.Random) -> None:
    """Put a directory, a named pipe, a device or a dangling link in the place of the file."""
    path.unlink()
    kind = draw.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == 2 else "absent")


def of_the_older(path: Path, _draw: random.Random) -> None:
    """Put the older checkpoint's file in the place of the file."""
    shutil.copyfile(path.parents[1] / "iter_0000007" / path.name, path)


def random_bytes(path: Path, draw: random.Random) -> None:
    """Replace the content, of the same size or of another."""
    size = path.stat().st_size if draw.random() < 0.5 else draw.randrange(3000)
    path.write_bytes(draw.randbytes(size))


def nested(path: Path, _draw: random.Random) -> None:
    """Replace the content by deep nesting."""
    path.write_text("[" * 50_000)


def exchanged(path: Path, draw: random.Random) -> None:
    """Exchange the file with another one of the checkpoint."""
    others = [other for other in path.parent.iterdir() if other != path]
    other = draw.choice(others)
    between = path.with_name("between")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def edited(path: Path, draw: random.Random) -> None:
    """Edit a value of the manifest; in half of the cases its checksum is made right again."""
    manifest = path.parent / "manifest.json"
    document = json.loads(manifest.read_text())
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.1:
            break
        place = inner
    odd = [None, -1, 10**400, 2**63, "x" * 5000, "\x1b[31m", [], {}, True, 1.5, "../../x", 9999]
    place[key] = draw.choice(odd)
    if draw.random() < 0.5:
        document.pop("manifest_sha256", None)
        document["manifest_sha256"] = _checksum(document)
    manifest.write_text(json.dumps(document))


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    *(flip, flip, flip, cut, append, blank, swap, remove, other_kind),
    *(of_the_older, random_bytes, nested, exchanged, edited, edited, edited),
]


@contextmanager
def time_limit() -> Iterator[None]:
    """Fail if the block takes longer than `SECONDS`."""

    def hang(*_: object) -> None:
        raise AssertionError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(folder: Path) -> str:
    """Load the newest checkpoint as `--load` does, and return what came of it."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    try:
        with time_limit():
            found = newest_verified(survey(folder))
            load_checkpoint(found.path, tensors, found.manifest, verify=False)
    except LmcoreError as error:
        return "refused" if "iter_0000014" in error.render() else f"refused: {error.render()}"
    expected = state(found.manifest.iteration)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors), "wrong weights"
    if found.manifest.iteration == 14:
        return "identical"
    warning = found.warning()
    assert warning is not None, "passed over in silence"
    assert "iter_0000014" in warning
    return "older, with a warning"


def run_cases(pristine: Path, folder: Path, seed: int, count: int) -> Counter[str]:
    """Damage copies of the newest checkpoint in *count* ways; return the number of each outcome."""
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    names = sorted(path.name for path in (pristine / "iter_0000014").iterdir())
    for number in range(count):
        damage = DAMAGE[number % len(DAMAGE)]
        name = draw.choice(names)
        shutil.copytree(pristine, folder)
        damage(folder / "iter_0000014" / name, draw)
        try:
            outcomes[outcome(folder)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, case {number}: {damage.__name__} of {name}")
            raise
        shutil.rmtree(folder)
    return outcomes


@pytest.mark.parametrize(
    "seed,count", [(1, 48), *(pytest.param(seed, 250, marks=pytest.mark.full) for seed in (2, 3))]
)
def test_damage_from_a_seed(pristine: Path, tmp_path: Path, seed: int, count: int):
    """Each case takes the older checkpoint with a warning, or refuses, or is no damage."""
    outcomes = run_cases(pristine, tmp_path / "checkpoints", seed, count)
    assert set(outcomes) <= {"older, with a warning", "identical", "refused"}, outcomes
    assert outcomes["older, with a warning"] > count // 2
