"""Processors of other machines: the facts that decide which kernels of the CPU compute.

Tests of a folder whose `conftest.py` uses the fixture `processor` depend on these facts
(`lmcore_cpu.kernel.processor.Facts`).  In the full set each of them runs with this machine's facts
and with every combination of other ones; in the fast set a test or module marked `processors` runs
with combinations that have every pair of facts.
The variable TEST_PROCESSOR gives one combination to all of them:

    TEST_PROCESSOR=mkl,bf16,avx512,onednn pytest tests/unit/generation

Facts choose code, they do not emulate it: combinations with instructions that this machine lacks
are skipped.  A module that does not import torch runs no kernels, and runs once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from suite.selection import SET

VARIABLE = "TEST_PROCESSOR"
HERE = "here"
_LIBRARIES = {
    "mkl": {"mkl": True, "prefers_mkl": True},
    "amd": {"mkl": True, "prefers_mkl": False},
    "openblas": {"mkl": False, "prefers_mkl": True},
}
_PRODUCTS = {
    "bf16": {"bfloat16_products": True, "float16_products": True},
    "fp32": {"bfloat16_products": False, "float16_products": False},
}
_INSTRUCTIONS = {
    "amx": ("amx", "avx512_bf16", "avx512", "avx2"),
    "avx512_bf16": ("avx512_bf16", "avx512", "avx2"),
    "avx512": ("avx512", "avx2"),
    "avx2": ("avx2",),
    "torch": (),
}
_ONEDNN = {
    "onednn": {"onednn": True, "onednn_bfloat16": True},
    "onednn32": {"onednn": True, "onednn_bfloat16": False},
    "without": {"onednn": False, "onednn_bfloat16": False},
}


def combinations() -> dict[str, dict[str, bool | tuple[str, ...]]]:
    """Return the facts of each combination, by name.

    No processor multiplies what oneDNN lacks, or has kernels for products that it does not have.
    """
    return {
        ",".join(names): {
            **_LIBRARIES[names[0]],
            **_PRODUCTS[names[1]],
            "instructions": _INSTRUCTIONS[names[2]],
            **_ONEDNN[names[3]],
        }
        for names in product(_LIBRARIES, _PRODUCTS, _INSTRUCTIONS, _ONEDNN)
        if (names[1], names[3]) != ("bf16", "onednn32")
        and not (names[1] == "fp32" and names[2] in {"amx", "avx512_bf16"})
    }


def covering() -> list[str]:
    """Return `here` and a few combinations in which every pair of facts occurs that any has."""
    pairs = {
        name: set(itertools.combinations(enumerate(name.split(",")), 2)) for name in combinations()
    }
    open_pairs, chosen = set().union(*pairs.values()), [HERE]
    while open_pairs:
        chosen.append(max(pairs, key=lambda name: len(pairs[name] & open_pairs)))
        open_pairs -= pairs[chosen[-1]]
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test each combination."""
    if "processor" not in metafunc.fixturenames:
        return
    marked = any(mark.name == "processors" for mark in metafunc.definition.iter_markers())
    wanted = marked or (metafunc.config.stash[SET].full and "torch" in vars(metafunc.module))
    if wanted and VARIABLE not in os.environ:
        fast = covering()
        cases = [
            pytest.param(name, marks=() if name in fast else pytest.mark.full)
            for name in [HERE, *combinations()]
        ]
        metafunc.parametrize("processor", cases, indirect=True)


@pytest.fixture
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the combination of facts that the test runs with; `here` for this machine's own."""
    name = getattr(request, "param", os.environ.get(VARIABLE, HERE))
    if name == HERE:
        yield name
        return
    from lmcore_cpu.kernel import processor as module

    chosen = combinations()
    if name not in chosen:
        raise pytest.UsageError(f"{VARIABLE}={name}: expected one of {', '.join(chosen)}")
    given, here = chosen[name], module.Facts()
    lacking = sorted(set(given["instructions"]) - set(here.instructions))
    lacking += [one for one in ("onednn", "onednn_bfloat16") if given[one] > getattr(here, one)]
    if lacking:
        pytest.skip(f"this machine cannot execute {name}: it has no {', '.join(lacking)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_here", module.Facts(**given))
        yield name


@pytest.fixture
def give_facts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that changes facts of the processor, by name, until the test ends."""
    module = pytest.importorskip("lmcore_cpu.kernel.processor")

    def give(cpuinfo: Path = module.CPUINFO, **given: bool | tuple[str, ...]) -> None:
        before = {name: fact for name, fact in vars(module.facts()).items() if name[0] != "_"}
        monkeypatch.setattr(module, "_here", module.Facts(cpuinfo, **{**before, **given}))

    return give
