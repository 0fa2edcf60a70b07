"""`Device.step_boundary`, `inference_mode` and `compile_backend` in training and generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmcore
from lmcore.cli.main import main
from lmcore.contract import Device
from lmcore_cpu import device as cpu

RUN = "--micro-batch-size 2 --global-batch-size 6 --train-iters 2 --device cpu"

Changed = Callable[..., None]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Changed:
    """Function that gives the CPU other attributes of `Device`."""
    create = cpu.create_device

    def change(**attributes: Any) -> None:
        def changed_device(settings: Any) -> Device:
            return dataclasses.replace(create(settings), **attributes)

        monkeypatch.setattr(cpu, "create_device", changed_device)

    return change


@pytest.fixture
def calls(changed: Changed) -> list[None]:
    """A list that grows by each call of `step_boundary`."""
    found: list[None] = []
    changed(step_boundary=lambda: found.append(None))
    return found


def test_steps(train: Any, calls: list[None]) -> None:
    """After each of three micro-batches and the optimizer, twice; before the last checkpoint."""
    run = train("run", RUN)
    assert run.status == 0, run.err
    assert len(calls) == 2 * (3 + 1) + 1


def test_evaluation_and_saves(train: Any, calls: list[None]) -> None:
    """After each of three batches of each evaluation; before each checkpoint."""
    more = "--eval-interval 1 --eval-iters 1 --split 8,2,0 --save-interval 1"
    run = train("run", f"{RUN} {more}")
    assert run.status == 0, run.err
    assert len(calls) == 2 * (3 + 1) + 2 * 3 + 2


@pytest.mark.parametrize("more", [[], ["--no-cache"], ["--beam-width", "2"]])
def test_tokens(train: Any, calls: list[None], more: list[str]) -> None:
    """After each generated token, with and without a cache, and in beam search."""
    run = train("run", RUN)
    calls.clear()
    words = ["generate", "--load", str(run.directory), "--prompt", "A", "--device", "cpu"]
    assert main([*words, "--tokens", "5", *more]) == 0
    assert len(calls) in {5, 6}  # with a cache, once more when there is nothing left to do


def test_the_estimate_of_sophia(train: Any, calls: list[None]) -> None:
    """Its pass over the first micro-batch has a boundary, and so has its update."""
    run = train("run", f"{RUN} --optimizer sophia --sophiag-hessian-interval 1")
    assert run.status == 0, run.err
    assert len(calls) == 2 * (2 + 3 + 1) + 1


def test_the_library(calls: list[None], tmp_path: Any) -> None:
    """After `backward`, after the optimizer's step, and before a checkpoint."""
    with lmcore.start(device="cpu", precision="fp32") as rt:
        model = torch.nn.Linear(2, 2)
        model, optimizer = rt.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for number in (1, 2):
            rt.backward(model(torch.ones(1, 2)).sum())
            rt.step(optimizer)
            assert len(calls) == 2 * number
        rt.save(tmp_path / "saved", model=model)
        assert len(calls) == 5
        rt.step_boundary()  # of a loop without updates
        assert len(calls) == 6


def test_generation_without_inference_mode(train: Any, changed: Changed, capsys: Any) -> None:
    """`torch.no_grad` takes its place, with the same text."""
    run = train("run", RUN)
    words = ["generate", "--load", str(run.directory), "--prompt", "A", "--device", "cpu"]
    seen: list[bool] = []
    texts = []
    for inference_mode in (True, False):
        changed(
            inference_mode=inference_mode,
            step_boundary=lambda: seen.append(torch.is_inference_mode_enabled()),
        )
        capsys.readouterr()
        assert main([*words, "--tokens", "5"]) == 0
        texts.append(capsys.readouterr().out)
        assert set(seen) == {inference_mode}
        seen.clear()
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compile_backend(train: Any, changed: Changed) -> None:
    """`--compile` gives the blocks to the device's own backend of `torch.compile`."""
    compiled: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    changed(compile_backend=backend)
    run = train("run", f"{RUN} --compile")
    assert run.status == 0, run.err
    assert compiled


def test_an_unknown_compile_backend(train: Any, changed: Changed) -> None:
    """A plugin's wrong name is an error of the plugin, before the first step."""
    changed(compile_backend="inductr")
    assert train("eager", RUN).status == 0
    run = train("run", f"{RUN} --compile")
    assert run.status == 1
    assert "device `cpu` names `inductr` as its `compile_backend`" in run.err
    assert "did you mean `inductor`?" in run.err
