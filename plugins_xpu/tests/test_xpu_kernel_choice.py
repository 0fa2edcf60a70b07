"""Kernel choice for an Intel GPU, by installed packages, dtype and case."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.contract import OP_SPECS, OpContext, OpImpl, OpTable, Resolution
from lmcore.contract.op.context import op_context
from lmcore.contract.op.packages import FACT, Package, UsablePackages, describe
from lmcore_xpu import kernels, plugin
from lmcore_xpu.packages import EXTENSION, TRITON

SPECS = {spec.name: spec for spec in OP_SPECS}
PAGE = Path(__file__).parents[2] / "docs/reference/xpu-kernels.md"
DTYPES = frozenset({"float32", "float16", "bfloat16"})

USUAL = {
    "head_dim": 64,
    "num_attention_heads": 12,
    "num_query_groups": 12,
    "seq_length": 1024,
    "causal": True,
    "masked": False,
    "dropout": 0.0,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "in_features": 768,
    "out_features": 3072,
    "bias": True,
    "rotary_dim": 64,
    "vocab_size": 50304,
    "compile": False,
}

FITS = {TRITON: Package("3.7.2")}
ENDED = {EXTENSION: Package("2.8.10+xpu", "is for torch 2.8")}
BUILT = {EXTENSION: Package("2.13.10+xpu")}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let a test decide on packages and compilers."""
    monkeypatch.setattr("lmcore.contract.op.table.missing_packages", lambda impl: [])
    monkeypatch.delenv("CXX", raising=False)
    found = {"gcc": "/usr/bin/gcc", "g++": "/usr/bin/g++"}
    monkeypatch.setattr(kernels.shutil, "which", found.get)
    return found


def offered(packages: dict[str, Package], **problems: str) -> list[OpImpl]:
    device: Any = SimpleNamespace(dtypes=DTYPES)
    usable = UsablePackages(packages, problems.get)
    return [*kernels.kernels_for(usable), *kernels.triton_kernels(device, usable)]


def resolve(impls: list[OpImpl], op: str, dtype: str = "bfloat16", **case: Any) -> Resolution:
    own = [OpImpl(**{**vars(impl), "plugin": "xpu"}) for impl in impls]
    table = OpTable(OP_SPECS, own, device_plugin="xpu")
    return table.resolve(op, op_context(SPECS[op], "xpu", dtype, {**USUAL, **case}))


@pytest.mark.parametrize("case", [{}, {"masked": True}, {"dropout": 0.1}, {"compile": True}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention(case: dict[str, Any], dtype: str) -> None:
    """Attention is torch's, which chooses its own backend, in every case."""
    assert resolve(offered(FITS | BUILT), "attention", dtype, **case).chosen == "sdpa"


@pytest.mark.parametrize(
    "op, packages, case, wanted",
    [
        ("adamw", FITS | BUILT, {"dtype": "float32"}, "fused"),
        ("grad_norm", FITS | BUILT, {"dtype": "float32"}, "foreach"),
        ("linear", FITS, {}, "onednn"),
        ("layer_norm", {}, {}, "torch"),
        ("layer_norm", BUILT, {}, "torch"),
        ("layer_norm", FITS, {}, "triton"),
        ("layer_norm", FITS, {"compile": True}, "torch"),
        ("rms_norm", FITS, {"dtype": "float16"}, "triton"),
        ("rms_norm", ENDED, {}, "torch"),
        ("bias_gelu", {}, {}, "torch"),
        ("swiglu", FITS, {}, "triton"),
        ("bias_dropout_add", {}, {"dropout": 0.1}, "torch"),
        ("scaled_masked_softmax", {}, {"masked": True}, "torch"),
        ("rotary_embedding", {}, {}, "torch"),
        ("rotary_embedding", BUILT, {}, "torch"),
        ("swiglu", BUILT, {}, "torch"),
        ("cross_entropy", {}, {"dtype": "float32"}, "torch"),
        ("linear_cross_entropy", {}, {}, "reference"),
        ("linear_cross_entropy", FITS, {}, "triton"),
        ("linear_cross_entropy", FITS, {"compile": True}, "triton"),
    ],
)
def test_other_ops(
    op: str, packages: dict[str, Package], case: dict[str, Any], wanted: str
) -> None:
    """The other ops get Triton's kernels where they are, then torch's, and the extension's last."""
    assert resolve(offered(packages), op, **case).chosen == wanted


@pytest.mark.parametrize(
    "packages, kernel, case, reason",
    [
        ({}, "ipex", {}, f"needs `{EXTENSION}`, not installed"),
        (ENDED, "ipex", {}, "is for torch 2.8"),
        (BUILT, "ipex", {"dtype": "float64"}, "computes in bfloat16 and float16 and float32, not"),
        (BUILT, "ipex", {"compile": True}, "is not for compiled blocks"),
        (BUILT, "ipex", {}, "`torch` has priority 10, this 5"),
        ({}, "triton", {}, f"needs `{TRITON}`, not installed"),
        ({TRITON: Package("", "is for other GPUs")}, "triton", {}, "is for other GPUs"),
        (FITS, "triton", {"dtype": "float64"}, "float64"),
        (FITS, "triton", {"compile": True}, "is not for compiled blocks"),
    ],
)
def test_reasons(
    packages: dict[str, Package], kernel: str, case: dict[str, Any], reason: str
) -> None:
    """Each kernel that is not chosen says why."""
    assert reason in dict(resolve(offered(packages), "layer_norm", **case).rejected)[kernel]


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "rotary_embedding", "swiglu"])
def test_the_extension_by_preference(op: str) -> None:
    """No kernel of it was measured on a GPU: `--ops` prefers it, in eager mode, in its dtypes."""
    table = OpTable(OP_SPECS, offered(FITS | BUILT), preferences={op: ("ipex",)})
    for dtype, compiled, reason in (
        *((name, False, None) for name in sorted(DTYPES)),
        ("float64", False, "computes in bfloat16 and float16 and float32, not float64"),
        ("bfloat16", True, "is not for compiled blocks"),
    ):
        case = op_context(SPECS[op], "xpu", dtype, {**USUAL, "compile": compiled})
        found = table.resolve(op, case)
        assert (found.chosen == "ipex") == (reason is None), (dtype, found)
        assert reason is None or reason in dict(found.rejected)["ipex"]


def test_triton_that_does_not_load() -> None:
    """The import's error is the reason, and torch's kernel is chosen."""
    impls = offered(FITS, **{TRITON: "libtriton.so: undefined symbol"})
    found = resolve(impls, "swiglu")
    assert found.chosen == "torch"
    assert dict(found.rejected)["triton"] == "libtriton.so: undefined symbol"


def test_the_extension_is_not_loaded_to_ask() -> None:
    """Its import replaces torch's ops in the whole process, so it waits until one is bound."""
    impls = offered(BUILT, **{EXTENSION: "must not be asked"})
    assert dict(resolve(impls, "rms_norm").rejected)["ipex"].startswith("`torch` has priority")


def test_a_host_without_a_compiler(
    compiler: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton builds what launches kernels on the host, in C++ for these GPUs."""
    del compiler["g++"]
    reason = dict(resolve(offered(FITS), "swiglu").rejected)["triton"]
    assert (
        reason == "Triton needs a C++ compiler: there is none of `$CXX`, `icpx`, `clang++`, `g++`"
    )
    compiler["c++-14"] = "/usr/bin/c++-14"
    monkeypatch.setenv("CXX", "c++-14")
    assert resolve(offered(FITS), "swiglu").chosen == "triton"


@pytest.mark.parametrize("op", list(SPECS))
def test_deterministic(op: str) -> None:
    """With `--deterministic` a kernel that does not claim it is out."""
    table = OpTable(OP_SPECS, offered(BUILT), traits=["deterministic"])
    chosen = table.resolve(op, op_context(SPECS[op], "xpu", "float32", USUAL)).chosen
    assert chosen != "ipex"


def test_without_the_sister_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no Triton kernels if `lmcore_triton` is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        kernels.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "lmcore_triton" else find(name, *more),
    )
    assert {kernel.id for kernel in offered(FITS)} == {
        *("sdpa", "onednn", "torch", "fused", "foreach", "ipex")
    }


def test_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook reads packages from the device's facts, and passes on what Triton needs to know."""
    seen: dict[str, Any] = {}

    def offers(device_type: str, **options: Any) -> list[OpImpl]:
        seen.update(options, device_type=device_type)
        return [OpImpl("swiglu", "triton", "a:b", options["priority"], supports=lambda case: None)]

    module: Any = ModuleType("lmcore_triton.offers")
    module.op_impls = offers
    package = ModuleType("lmcore_triton")
    package.__spec__ = importlib.machinery.ModuleSpec("lmcore_triton", None)
    monkeypatch.setitem(sys.modules, "lmcore_triton", package)
    monkeypatch.setitem(sys.modules, "lmcore_triton.offers", module)
    facts = {FACT: describe({TRITON: Package("3.5.0", "torch wants another")})}
    device: Any = SimpleNamespace(facts=facts, dtypes=DTYPES)
    found = plugin.lmcore_op_impls(device)
    assert seen == {"device_type": "xpu", "dtypes": DTYPES, "priority": 16}
    supports = found[-1].supports
    assert supports is not None
    verdict = supports(OpContext("xpu", "float32"))
    assert verdict is not None
    assert verdict.reason == "torch wants another"


def test_an_import_is_tried_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook's packages are tried by their own modules."""
    tried: list[str] = []
    kind = SimpleNamespace(import_problem=lambda: tried.append(TRITON))
    monkeypatch.setitem(kernels.PACKAGES, TRITON, kind)  # type: ignore[arg-type, index]
    device: Any = SimpleNamespace(facts={FACT: describe(FITS)}, dtypes=DTYPES)
    assert resolve(plugin.lmcore_op_impls(device), "swiglu").chosen == "triton"
    assert tried == [TRITON]


def test_torch_has_what_is_promised() -> None:
    """The fused update and updates of lists are on torch's own lists of what it has here."""
    from torch.utils._foreach_utils import (
        _get_foreach_kernels_supported_devices,
        _get_fused_kernels_supported_devices,
    )

    assert "xpu" in _get_fused_kernels_supported_devices()
    assert "xpu" in _get_foreach_kernels_supported_devices()
    assert hasattr(torch, "_fused_adamw_")


def test_the_page_has_them_all() -> None:
    """Every kernel is in the documentation with its op and priority."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    for kernel in offered(FITS):
        cells = next(line for line in rows if line.startswith(f"| `{kernel.op}` |")).split("|")
        assert re.search(rf"`{kernel.id}` {kernel.priority}\b", cells[2]), (kernel.op, kernel.id)
