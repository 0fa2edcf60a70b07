"""Capabilities of the supported versions of torch."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch.nn import functional

from lmcore.contract import torch_versions
from lmcore.contract.precision.products import ProductCounter
from lmcore.contract.torch_versions import (
    ACCELERATOR_GRAPH,
    ACCELERATOR_MEMORY,
    ATTENTION_KERNELS,
    CAPABILITIES,
    CUSTOM_SHARD_COLLECTIVES,
    GROUPED_CPU_ATTENTION,
    MUON,
    NEWEST,
    OLDEST,
    SCHEDULE_WITHOUT_OUTPUTS,
    STAGE_GRADIENTS,
    TorchCapability,
)

ROOT = Path(__file__).resolve().parents[3]


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_installed_torch_has_what_its_version_says() -> None:
    """Each capability that can be looked up is there exactly from its version on."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import attention

    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with ProductCounter() as counter:
        functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    found = {
        ACCELERATOR_GRAPH: hasattr(torch.accelerator, "Graph"),
        ACCELERATOR_MEMORY: hasattr(torch.accelerator, "memory_allocated"),
        ATTENTION_KERNELS: hasattr(attention, "activate_flash_attention_impl"),
        CUSTOM_SHARD_COLLECTIVES: hasattr(FSDPModule, "set_custom_all_gather"),
        GROUPED_CPU_ATTENTION: "bmm" not in {product.op for product in counter.products},
        MUON: hasattr(torch.optim, "Muon"),
        SCHEDULE_WITHOUT_OUTPUTS: "return_outputs" in _parameters(Schedule1F1B.step),
        STAGE_GRADIENTS: "input_grads" in _parameters(PipelineStage.__init__),
    }
    assert found == {capability: bool(capability) for capability in found}


@pytest.mark.parametrize(
    "version, is_there",
    [
        ("2.8.0+cpu", False),
        ("2.9.0a0+c0ffee", True),  # a vendor's pre-release
        ("2.9.0", True),
        ("2.13.0+xpu", True),
        ("3.0.0", True),
    ],
)
def test_versions(version: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two numbers decide; a setting that needs an absent capability is an error."""
    monkeypatch.setattr(torch_versions, "_installed", lambda: version)
    assert bool(MUON) is is_there
    problem = MUON.problem("`--optimizer muon`", hint="use `--optimizer adam`")
    assert (problem is None) is is_there
    if problem is not None:
        assert "`--optimizer muon` needs torch 2.9 or newer" in str(problem)
        assert version in str(problem.why)
        assert problem.hint == "use `--optimizer adam`, or install a newer torch"


def test_the_range_is_the_same_everywhere() -> None:
    """Package, plugins and documentation state the same oldest version.

    The package's bound admits vendors' builds, which have the version numbers of pre-releases.
    """
    texts = [ROOT / "pyproject.toml", *ROOT.glob("plugin*/**/plugin.py")]
    stated = {
        version
        for path in texts
        for version in re.findall(r'torch(?:>=|=">=)([\d.]+)', path.read_text(encoding="utf-8"))
    }
    assert {".".join(version.split(".")[:2]) for version in stated} == {OLDEST}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    for version in ("2.8.0a0+5228986c39.nv25.06", "2.8.0+cpu", "2.9.1"):
        assert bound.specifier.contains(version), version
    assert not bound.specifier.contains("2.7.1+cu128")
    versions = [capability.since for capability in CAPABILITIES]
    assert versions == sorted(versions, key=lambda text: [int(part) for part in text.split(".")])
    page = (ROOT / "docs/reference/torch-versions.md").read_text(encoding="utf-8")
    table, _, _ = page.partition("\n## ")
    rows = [
        f"| {capability.since} | {capability.description} | {capability.without} |"
        for capability in CAPABILITIES
    ]
    assert [line for line in table.splitlines() if line.startswith("| 2.")] == rows
    assert f"torch {OLDEST} to {NEWEST}" in page


def test_capabilities_are_exported() -> None:
    """Each capability of the module is in its table."""
    named = {each for each in vars(torch_versions).values() if isinstance(each, TorchCapability)}
    assert named == set(CAPABILITIES)
