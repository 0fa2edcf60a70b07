"""Checkpoints of the `deepspeed` package itself: read bit by bit, and loaded by it when written."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
import torch
from deepspeed_files import Layout, name_of
from megatron_models import GPT, LLAMA, MemoryState

from lmcore.conversion.huggingface.recipes import recipes_of
from lmcore.conversion.huggingface.write import config_of
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.state import ModelState, Progress
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # up to three starts of several processes
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: `tox -e deepspeed` installs it",
    ),
]

PEER = Path(deepspeed_files.__file__).with_name("deepspeed_peer.py")
SETTINGS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
"""Settings of Adam in the peer."""

Weights = dict[str, torch.Tensor]
Run = Callable[..., Weights]


@pytest.fixture
def run() -> Run:
    """Start processes of DeepSpeed that save to `out`, and return their float32 weights."""

    def go(out: Path, size: int, **settings: Any) -> Weights:
        file = out.parent / f"{out.name}.json"
        file.write_text(json.dumps(settings | {"out": str(out)}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        common |= {"LOCAL_SIZE": str(size), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        logs = [out.parent / f"{out.name}.{rank}.log" for rank in range(size)]
        processes = []
        for rank, log in enumerate(logs):
            ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(PEER), str(file)],
                        env={**os.environ, **common, **ranked},
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )
        statuses = [process.wait(timeout=250) for process in processes]
        assert not any(statuses), "\n".join(log.read_text()[-3000:] for log in logs)
        found: Weights = {}
        for rank in range(size):
            # The last stage has positions, too, beside its copy of the embedding; it uses none.
            found = torch.load(f"{out}.{rank}.weights") | found
        return found

    return go


def named(shape: ModelShape, layout: Layout) -> dict[str, str]:
    """Return lmcore's name of each parameter by its name in the module."""
    state = MemoryState(shape)
    return {name_of(name, state, layout): name for name in state.parameters}


def module_settings(shape: ModelShape, layout: Layout, dtype: str) -> dict[str, Any]:
    """Return the peer's settings for a module with Megatron's parameters."""
    args = architecture_arguments(shape) | {
        "pipeline_model_parallel_size": max(layout.stages, 1),
        "consumed_train_samples": 12,
    }
    sizes = MemoryState(shape).parameters
    shapes = {theirs: list(sizes[ours]) for theirs, ours in named(shape, layout).items()}
    found = {"zero": layout.zero, "dtype": dtype, "args": args, "stages": layout.stages}
    if not layout.stages:
        return found | {"shapes": shapes}
    layers: dict[int, dict[str, list[int]]] = {}
    for name, size in shapes.items():
        number, inside = name.split(".", 1)
        layers.setdefault(int(number), {})[inside] = size
    return found | {"layers": [layers[number] for number in sorted(layers)]}


def compare(found: ModelState, weights: Weights, names: dict[str, str]) -> None:
    """Compare every weight with the module's own, bit by bit."""
    packing = Packing(found.shape, 1)
    for theirs, ours in names.items():
        other = theirs.replace("1.", "tied_modules.embed.", 1) if theirs[:2] == "1." else theirs
        expected = weights[theirs if theirs in weights else other]
        [read] = packing.split(ours, found.read(ours))
        assert torch.equal(read.float(), expected), theirs


def continued(state: ModelState, steps: int, dtype: torch.dtype) -> ModelState:
    """Return *state* after further steps of the peer's module, alone and without a pipeline."""
    assert state.progress is not None
    weights = {name: state.read(name).clone().float() for name in state.parameters}
    groups = [
        {"params": [w for w in weights.values() if (w.ndim > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
    for name, weight in weights.items():
        moments = {kind: state.read(name, kind).clone() for kind in state.kinds[1:]}
        done = torch.tensor(float(state.progress.optimizer_step or 0))
        adam.state[weight] = {"step": done, **moments}
    scale = float((state.progress.loss_scale or {"value": 1})["value"])
    for _ in range(steps):
        for weight in weights.values():
            low = weight.detach().clone().to(dtype).requires_grad_()
            ((low**2).mean().float() * scale).backward()
            assert low.grad is not None
            weight.grad = low.grad.float() / scale
        adam.step()
    found = MemoryState(state.shape, optimizer=True)
    for name, weight in weights.items():
        found.tensors[name, state.kinds[0]] = weight
        for kind in state.kinds[1:]:
            found.tensors[name, kind] = adam.state[weight][kind]
    return found


def same_as(found: ModelState, expected: ModelState) -> None:
    """Compare weights and both moments bit by bit."""
    for name in expected.parameters:
        for kind in expected.kinds:
            assert torch.equal(found.read(name, kind), expected.read(name, kind)), (name, kind)


@pytest.mark.parametrize(
    "layout, dtype, size",
    [
        (Layout(zero=1), "bfloat16", 2),
        (Layout(zero=3), "float32", 2),
        (Layout(zero=1, stages=2), "bfloat16", 2),
        pytest.param(Layout(), "float32", 1, marks=pytest.mark.full),
        pytest.param(Layout(), "bfloat16", 2, marks=pytest.mark.full),
        pytest.param(Layout(zero=1), "float32", 1, marks=pytest.mark.full),
        pytest.param(Layout(zero=2), "bfloat16", 1, marks=pytest.mark.full),
        pytest.param(Layout(zero=2), "float32", 2, marks=pytest.mark.full),
        pytest.param(Layout(zero=3), "bfloat16", 2, marks=pytest.mark.full),
        pytest.param(Layout(stages=2), "float32", 2, marks=pytest.mark.full),
        pytest.param(Layout(zero=1, stages=1), "float32", 2, marks=pytest.mark.full),
        pytest.param(Layout(zero=1, stages=2), "float32", 4, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_it_saves_is_read(
    layout: Layout, dtype: str, size: int, run: Run, tmp_path: Path
) -> None:
    """Weights are the module's in float32; with ZeRO there is the state of Adam."""
    weights = run(tmp_path / "saved", size, **module_settings(GPT, layout, dtype))
    found = read_deepspeed(tmp_path / "saved")
    assert len(found.kinds) > 1
    # Without ZeRO, DeepSpeed does a first update, with gradients of 0, when a run in bf16 begins.
    step = 4 if dtype == "bfloat16" and not layout.zero else 3
    assert found.progress == Progress(3, 12, step, adam=SETTINGS)
    if dtype == "float32" or layout.zero:
        compare(found, weights, named(GPT, layout))


@pytest.mark.parametrize(
    "dtype, fused",
    [
        ("bfloat16", True),
        pytest.param("float32", False, marks=pytest.mark.full),
        pytest.param("bfloat16", False, marks=pytest.mark.full),
        pytest.param("float16", True, marks=pytest.mark.full),
        pytest.param("float16", False, marks=pytest.mark.full),
    ],
)
def test_a_run_without_zero_continues(dtype: str, fused: bool, run: Run, tmp_path: Path) -> None:
    """One process continues a checkpoint of two without ZeRO exactly as the two did."""
    settings = module_settings(GPT, Layout(), dtype) | {"fused": fused, "more": 2}
    run(tmp_path / "saved", 2, **settings)
    begin, end = read_deepspeed(tmp_path / "saved"), read_deepspeed(tmp_path / "saved-later")
    if dtype != "float16":  # DeepSpeed 0.19.8 divides gradients of a loss that it did not scale
        same_as(end, continued(begin, 2, getattr(torch, dtype)))
    assert begin.progress is not None
    assert end.progress is not None
    assert (begin.progress.iteration, end.progress.iteration) == (3, 5)
    scale = {"value": 4096.0, "tolerance": 1}
    for progress, good in ((begin.progress, 2), (end.progress, 4)):
        assert progress.loss_scale == (scale | {"good_steps": good} if dtype == "float16" else None)


@pytest.mark.full
def test_a_pipeline_in_bfloat16_without_zero(run: Run, tmp_path: Path) -> None:
    """Its partitions have names, and no shapes; the model's file has the first one of them, too."""
    run(tmp_path / "saved", 4, **module_settings(GPT, Layout(stages=2), "bfloat16"))
    state = read_deepspeed(tmp_path / "saved")
    assert len(state.kinds) > 1
    assert state.progress == Progress(3, 12, 3, adam=SETTINGS)
    for name in state.parameters:
        assert [state.dtype(name, kind) for kind in state.kinds] == [torch.float32] * 3
        assert state.read(name, "exp_avg").any(), name
        assert state.read(name).isfinite().all()
    for path in (tmp_path / "saved" / "global_step3").glob("*optim_states.pt"):
        path.unlink()
    found = read_deepspeed(tmp_path / "saved")
    assert len(found.kinds) == 1
    assert any("the share of the first of 2 data-parallel ranks" in one for one in found.notes)


@pytest.mark.parametrize(
    "zero", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_a_model_of_transformers(zero: int, run: Run, tmp_path: Path) -> None:
    """Its own names are read by the `config.json` beside."""
    recipes = recipes_of("llama", LLAMA)
    shapes = {name: list(size) for one in recipes.values() for name, size in one.sources.items()}
    out = tmp_path / "saved"
    weights = run(out, 2, zero=zero, dtype="bfloat16", shapes=shapes)
    config = config_of(LLAMA, dtype="bfloat16", eos=None, bos=None)
    (out / "config.json").write_text(json.dumps(config))
    found = read_deepspeed(out)
    assert found.shape == LLAMA
    assert len(found.kinds) == 3
    for name, recipe in recipes.items():
        expected = recipe.join([weights[source] for source in recipe.sources])
        assert torch.equal(found.read(name), expected), name


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.full)])
def test_its_universal_checkpoint_is_read(zero: int, run: Run, tmp_path: Path) -> None:
    """DeepSpeed's own conversion gives the same weights and states as the partitions."""
    settings = module_settings(GPT, Layout(zero=zero), "bfloat16")
    info = {"vocabulary_parameter_patterns": [], "original_vocab_size": 24}
    run(tmp_path / "saved", 2, **settings, universal_info=info)
    target = tmp_path / "universal" / "global_step3_universal"
    target.parent.mkdir()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(tmp_path / "saved" / "global_step3")]
    command += ["--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, expected = read_deepspeed(target.parent), read_deepspeed(tmp_path / "saved")
    assert (found.kinds, found.progress) == (expected.kinds, expected.progress)
    for name in expected.parameters:
        for kind in expected.kinds:
            assert torch.equal(found.read(name, kind), expected.read(name, kind)), (name, kind)


@pytest.mark.parametrize(
    "layout, size, dtype",
    [
        (Layout(zero=1, stages=2), 2, "float32"),
        (Layout(zero=3), 2, "float16"),
        pytest.param(Layout(zero=1), 2, "float32", marks=pytest.mark.full),
        pytest.param(Layout(zero=1), 2, "float16", marks=pytest.mark.full),
        pytest.param(Layout(zero=2), 1, "float32", marks=pytest.mark.full),
        pytest.param(Layout(zero=2), 2, "bfloat16", marks=pytest.mark.full),
        pytest.param(Layout(zero=3), 2, "float32", marks=pytest.mark.full),
        pytest.param(Layout(zero=1, stages=1), 2, "float32", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_it_loads_a_universal_checkpoint(
    layout: Layout, size: int, dtype: str, run: Run, tmp_path: Path
) -> None:
    """Weights, moments, number of updates and loss scale equal DeepSpeed's; so do later steps."""
    scale = {"value": 1024.0, "good_steps": 12, "tolerance": 1} if dtype == "float16" else None
    progress = Progress(7, 70, optimizer_step=6, loss_scale=scale)
    state = MemoryState(GPT, optimizer=True, progress=progress, vocab_size=21)
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    style = "pipeline" if layout.stages else "legacy"
    kind = torch.float16 if scale else torch.float32
    write_deepspeed(state, tmp_path / "ours", None, style=style, dtype=kind)
    settings = module_settings(GPT, layout, dtype) | {"fused": layout.zero == 3}
    settings |= {"load": str(tmp_path / "ours"), "universal": True, "seed": 1}
    settings |= {} if layout.stages else {"more": 2}
    run(tmp_path / "saved", size, **settings)
    found = read_deepspeed(tmp_path / "saved")
    assert found.progress is not None
    assert (found.progress.optimizer_step, found.progress.loss_scale) == (6, scale)
    assert found.progress.adam == SETTINGS
    same_as(found, state)
    if layout.stages:
        return
    later = read_deepspeed(tmp_path / "saved-later")
    assert later.progress is not None
    assert (later.progress.iteration, later.progress.optimizer_step) == (9, 8)
    assert later.progress.loss_scale == (scale and scale | {"good_steps": 14})
    same_as(later, continued(found, 2, getattr(torch, dtype)))


@pytest.mark.parametrize(
    "layout, size",
    [(Layout(stages=2), 2), pytest.param(Layout(), 1, marks=pytest.mark.full)],
    ids=str,
)
def test_it_loads_weights(layout: Layout, size: int, run: Run, tmp_path: Path) -> None:
    """Layer files and rank files are loaded as by `--finetune`."""
    state = MemoryState(GPT)
    style = "pipeline" if layout.stages else "legacy"
    write_deepspeed(state, tmp_path / "ours", None, style=style)
    settings = module_settings(GPT, layout, "float32") | {"load": str(tmp_path / "ours")}
    weights = run(tmp_path / "saved", size, **settings, seed=1)
    compare(state, weights, named(GPT, layout))
