"""Buckets of the distributed optimizer that megatron-core itself saves, in several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import BERT, GPT, LLAMA, MemoryState, record
from suite.selection import peer, selected

from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import parameter_of
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.model.shape import ModelShape

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),  # starts of up to four processes for each case
]

SCRIPT = Path(__file__).parents[4] / "lib" / "megatron_peer.py"
SHAPES = {"gpt": GPT, "llama": LLAMA, "bert": BERT}
KEYS = {WEIGHT: "param", **{kind: kind for kind in ADAM}}
ADAM_SETTINGS = {"beta1": 0.85, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}

Tensors = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Run of megatron-core: model, layout, data-parallel ranks, dtype, elements of a bucket.

    The last one is how it saves the state.
    """

    model: str
    layout: tuple[int, int, int] = (1, 1, 1)
    data: int = 1
    dtype: str = "bfloat16"
    bucket: int | None = None
    sharding: str = "dp_reshardable"

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return SHAPES[self.model]

    def settings(self, out: Path) -> dict[str, Any]:
        """Return the settings of the peer."""
        tensor, pipeline, virtual = self.layout
        args = architecture_arguments(self.shape)
        args |= {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "consumed_train_samples": 24,
        }
        return {
            "out": str(out),
            "args": args,
            "tensor": tensor,
            "pipeline": pipeline,
            "virtual": virtual,
            "world": tensor * pipeline * self.data,
            "dtype": self.dtype,
            "bucket": self.bucket,
            "sharding": self.sharding,
        }


CASES = [
    Case("gpt", data=2),
    Case("gpt", dtype="float32", bucket=900),
    Case("gpt", layout=(1, 2, 1), bucket=900),
    Case("gpt", layout=(1, 2, 2), data=2, dtype="float16"),
    Case("llama", layout=(2, 1, 1), data=2, bucket=900),
    Case("llama", layout=(2, 2, 2), bucket=1500),
    Case("gpt", data=2, sharding="dp_zero_gather_scatter"),
    Case("gpt", layout=(1, 2, 2), data=2, dtype="float16", sharding="dp_zero_gather_scatter"),
    Case("llama", layout=(2, 1, 1), data=2, bucket=900, sharding="dp_zero_gather_scatter"),
    Case("llama", layout=(2, 2, 2), dtype="float32", sharding="dp_zero_gather_scatter"),
    Case("bert", layout=(2, 2, 1), bucket=900),
    Case("bert", layout=(1, 2, 2), dtype="float16", sharding="dp_zero_gather_scatter"),
]


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with what megatron-core saved, by the number of the case."""
    peer("megatron")
    root = tmp_path_factory.mktemp("megatron")
    cases = [case for case in CASES if case in selected(request, "case")]
    settings = root / "cases.json"
    settings.write_text(
        json.dumps([case.settings(root / f"{CASES.index(case)}") for case in cases])
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(settings)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def held_by_ranks(out: Path, case: Case) -> Tensors:
    """Return each parameter and its moments, joined from what every rank's optimizer held."""
    layout = Layout(*case.layout)
    packing = Packing(case.shape, layout.tensor)
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for path in sorted(out.parent.glob(f"{out.name}.*.state")):
        content = torch.load(path)
        rank, stage = content["where"]
        for full, one in content["state"].items():
            part, foreign = full.split(".", 1)
            if one["range"] is None or (case.shape.tied and foreign == "output_layer.weight"):
                continue
            local = parameter_of(foreign, swiglu=case.shape.swiglu, names=record(case.shape))
            assert local is not None
            if local.startswith("blocks."):
                _, number, inside = local.split(".", 2)
                block = layout.layers(case.shape.num_layers, stage, int(part))[int(number)]
                local = f"blocks.{block}.{inside}"
            for kind, key in KEYS.items():
                ranks = parts.setdefault((local, kind), {})
                whole = ranks.setdefault(rank, torch.full(one["weight"].shape, torch.nan))
                whole.view(-1)[slice(*one["range"])] = one[key].float()
    return {
        (name, kind): packing.join(name, [ranks[rank] for rank in range(layout.tensor)])
        for (name, kind), ranks in parts.items()
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_buckets_are_read(case: Case, saved: Path, tmp_path: Path) -> None:
    """Main parameters and moments of all ranks are read bit by bit, and converted to a run."""
    out = saved / f"{CASES.index(case)}"
    expected = held_by_ranks(out, case)
    found = DistributedState(out)
    assert (found.shape, found.kinds) == (case.shape, (WEIGHT, *ADAM))
    assert {name for name, _ in expected} == set(found.parameters)
    assert found.progress is not None
    assert (found.progress.iteration, found.progress.optimizer_step) == (2, 2)
    assert found.progress.adam == ADAM_SETTINGS
    convert(out, tmp_path / "run", "lmcore")
    run = LmcoreState(tmp_path / "run")
    for (name, kind), tensor in expected.items():
        assert torch.equal(found.read(name, kind).float(), tensor), (name, kind)
        assert torch.equal(run.read(name, kind), tensor), (name, kind)


@pytest.mark.parametrize("case", [CASES[0]], ids=str)
def test_its_weights_alone(case: Case, saved: Path) -> None:
    """Without the optimizer they are the model's own, to which the main parameters round."""
    out = saved / f"{CASES.index(case)}"
    expected = held_by_ranks(out, case)
    found = read_state(out, weights_only=True)
    assert found.kinds == (WEIGHT,)
    for name in MemoryState(case.shape).parameters:
        assert found.dtype(name) == torch.bfloat16
        assert torch.equal(found.read(name), expected[name, WEIGHT].bfloat16()), name
