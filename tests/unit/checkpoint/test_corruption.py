"""Damage from a seed: no wrong weights, no hang, no traceback, nothing passed over in silence."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import TO_A_FILE, Damage, time_limit

from lmcore.base.errors import LmcoreError
from lmcore.checkpoint import load_checkpoint, newest_verified, save_checkpoint, survey
from lmcore.checkpoint.manifest import _checksum


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


def of_the_older(path: Path, _draw: random.Random) -> None:
    """Put the older checkpoint's file in the place of the file."""
    shutil.copyfile(path.parents[1] / "iter_0000007" / path.name, path)


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


def reseal(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as someone with bad intent would."""
    manifest = checkpoint / "manifest.json"
    document = json.loads(manifest.read_text())
    for name in document["files"]:
        content = (checkpoint / name).read_bytes()
        document["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    document.pop("manifest_sha256")
    document["manifest_sha256"] = _checksum(document)
    manifest.write_text(json.dumps(document))


def forged_index(path: Path, draw: random.Random) -> None:
    """Change the dtype, shape, chunks or byte ranges of a tensor in the index, with checksums."""
    index = path.parent / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    name = draw.choice(list(metadata.state_dict_metadata))
    entry = metadata.state_dict_metadata[name]
    key = draw.choice(list(metadata.storage_data))
    stored = metadata.storage_data[key]
    kind = draw.randrange(8)
    if kind == 0:
        entry.properties.dtype = draw.choice([torch.int32, torch.bfloat16, torch.float64])
    elif kind == 1:
        entry.size = torch.Size([*entry.size[:-1], entry.size[-1] + draw.choice([-1, 1, 2**40])])
    elif kind == 2:
        entry.chunks[0].offsets = torch.Size([1] * len(entry.size))
    elif kind == 3:
        entry.chunks.append(entry.chunks[0])
    elif kind == 4:
        stored.offset += draw.choice([-1, 1, 64, 2**50])
    elif kind == 5:
        stored.length = draw.choice([0, -1, stored.length - 1, 2**50])
    elif kind == 6:
        stored.relative_path = draw.choice(["../x", "/etc/passwd", ".metadata", "manifest.json"])
    else:
        del metadata.storage_data[key]
    index.write_bytes(pickle.dumps(metadata))
    reseal(path.parent)


def forged_tensor(path: Path, draw: random.Random) -> None:
    """Put a tensor of another shape or dtype, or another object, into the shard, with checksums."""
    shard = path.parent / "__0_0.distcp"
    other = draw.choice(
        [torch.zeros(3), torch.zeros(1200, dtype=torch.int64), {"a": 1}, "text", [torch.zeros(2)]]
    )
    stream = io.BytesIO()
    torch.save(other, stream)
    content = stream.getvalue()
    if draw.random() < 0.5:
        content = pickle.dumps(Evil())
    content += bytes(max(0, shard.stat().st_size - len(content)))
    shard.write_bytes(content)
    reseal(path.parent)


def forged_code(path: Path, _draw: random.Random) -> None:
    """Put a pickle that runs code in the place of the index, with checksums."""
    (path.parent / ".metadata").write_bytes(pickle.dumps(Evil()))
    reseal(path.parent)


class Evil:
    """Object whose pickle runs code."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Return a call that is seen if it is made."""
        return os.mkdir, (str(EXECUTED),)


EXECUTED = Path(tempfile.gettempdir()) / f"lmcore-tests-executed-{os.getpid()}"
"""Directory that appears if code of a checkpoint was run."""

DAMAGE: list[Damage] = [
    *TO_A_FILE,
    *(of_the_older, edited, edited, edited, forged_index, forged_index, forged_tensor, forged_code),
]


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
    "seed,count", [(1, 60), *(pytest.param(seed, 250, marks=pytest.mark.full) for seed in (2, 3))]
)
def test_damage_from_a_seed(pristine: Path, tmp_path: Path, seed: int, count: int):
    """Each case takes the older checkpoint with a warning, or refuses, or is no damage."""
    outcomes = run_cases(pristine, tmp_path / "checkpoints", seed, count)
    assert set(outcomes) <= {"older, with a warning", "identical", "refused"}, outcomes
    assert outcomes["older, with a warning"] > count // 2
    assert not EXECUTED.exists()
