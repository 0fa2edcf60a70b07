"""Kernel choice by GPU generation, installed packages, dtype and case."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import OP_SPECS, OpContext, OpImpl, OpTable, Resolution
from lmcore.contract.op.context import op_context
from lmcore.contract.op.packages import FACT, Package, describe
from lmcore_cuda.kernel.rules import Gpu
from lmcore_cuda.kernels import kernels_for, op_impls
from lmcore_cuda.packages import PACKAGES

SPECS = {spec.name: spec for spec in OP_SPECS}
CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
VERSIONS = {
    "flash-attn": "2.8.3",
    "flash-attn-4": "4.0.0b18",
    "liger-kernel": "0.8.5",
    "transformer-engine": "2.8.0",
}

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


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what is installed to the packages of the `Gpu`, with torch 2.13; nothing is loaded."""
    monkeypatch.setattr("lmcore.contract.op.table.missing_packages", lambda impl: [])
    monkeypatch.setattr("lmcore.contract.torch_versions._installed", lambda: "2.13.0")
    monkeypatch.setattr(
        "torch.nn.attention.list_flash_attention_impls", lambda: ["FA3", "FA4"], raising=False
    )


def gpu(capability: tuple[int, int], *packages: str, **problems: str) -> Gpu:
    found = {name: Package(VERSIONS.get(name, "1.0"), problems.get(name)) for name in packages}
    return Gpu(capability, found, lambda name: None)


def resolve(device: Gpu, op: str, dtype: str = "bfloat16", **case: Any) -> Resolution:
    impls = [OpImpl(**{**vars(impl), "plugin": "cuda"}) for impl in kernels_for(device)]
    table = OpTable(OP_SPECS, impls, device_plugin="cuda")
    return table.resolve(op, op_context(SPECS[op], "cuda", dtype, {**USUAL, **case}))


FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")

ATTENTION: dict[tuple[tuple[str, ...], str], list[str]] = {
    ((), "plain"): ["sdpa"] * 8,
    (("flash-attn",), "plain"): ["sdpa"] * 8,
    (("flash-attn-3",), "plain"): ["sdpa"] * 5 + ["flash-attn-3", "sdpa", "sdpa"],
    (("flash-attn-4",), "plain"): ["sdpa"] * 5 + ["flash-attn-4", "flash-attn-4", "sdpa"],
    (FLASH, "plain"): ["sdpa"] * 5 + ["flash-attn-3", "flash-attn-4", "sdpa"],
    (FLASH, "compiled"): ["sdpa"] * 5 + ["sdpa-fa3", "sdpa-fa4", "sdpa"],
    (FLASH, "dropout"): ["sdpa"] * 8,
    (FLASH, "float32"): ["sdpa"] * 8,
    (FLASH, "wide"): ["sdpa"] * 5 + ["flash-attn-3", "sdpa", "sdpa"],
    (FLASH, "odd"): ["sdpa"] * 8,
    (FLASH, "masked"): ["sdpa"] * 2 + ["flex"] * 6,
    ((), "masked"): ["sdpa"] * 2 + ["flex"] * 6,
    ((), "masked and dropout"): ["sdpa"] * 8,
    ((), "compiled"): ["sdpa"] * 8,
}
"""The kernel on each of `CAPABILITIES`, by the packages and the case."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"compile": True},
    "dropout": {"dropout": 0.1},
    "float32": {"dtype": "float32"},
    "wide": {"head_dim": 256},
    "odd": {"head_dim": 60},
    "masked": {"masked": True},
    "masked and dropout": {"masked": True, "dropout": 0.1},
}


@pytest.mark.parametrize("packages,case", ATTENTION)
def test_attention(packages: tuple[str, ...], case: str) -> None:
    """The kernel of attention is the table's, on every generation, in both half precisions."""
    wanted = ATTENTION[packages, case]
    for dtype in ("bfloat16", "float16"):
        chosen = [
            resolve(
                gpu(capability, *packages), "attention", **{"dtype": dtype, **CASES[case]}
            ).chosen
            for capability in CAPABILITIES
        ]
        assert chosen == wanted


@pytest.mark.parametrize(
    "kernel,capability,case,reason",
    [
        ("flash-attn-3", (8, 0), {}, "is for compute capability 9.x, this GPU has 8.0"),
        ("flash-attn-4", (12, 0), {}, "is for compute capability 9.x and 10.x, this GPU has 12.0"),
        ("flash-attn-2", (7, 5), {}, "is for compute capability 8.0 or newer, this GPU has 7.5"),
        ("flash-attn-3", (9, 0), {"dropout": 0.1}, "has no dropout"),
        ("flash-attn-2", (9, 0), {"masked": True}, "takes no mask"),
        ("flash-attn-3", (9, 0), {"dtype": "float32"}, "computes in bfloat16 and float16, not"),
        ("flash-attn-4", (10, 0), {"head_dim": 256}, "takes 8 to 128 channels a head"),
        ("flash-attn-3", (9, 0), {"compile": True}, "is not for compiled blocks"),
        ("sdpa-fa3", (9, 0), {}, "is for compiled blocks"),
        ("flex", (9, 0), {}, "is for masks; this case has none"),
        ("flash-attn-2", (8, 0), {}, "`sdpa` has priority 10, this 8"),
    ],
)
def test_reasons(
    kernel: str, capability: tuple[int, int], case: dict[str, Any], reason: str
) -> None:
    """Each kernel that is not chosen says why, in words that name the limit."""
    reasons = dict(resolve(gpu(capability, *FLASH), "attention", **case).rejected)
    assert reason in reasons[kernel]


def test_a_package_that_is_not_there() -> None:
    """A kernel of a package that is not installed says which."""
    reasons = dict(resolve(gpu((9, 0)), "attention").rejected)
    assert reasons["flash-attn-3"] == "needs `flash-attn-3`, not installed"


def test_a_package_for_another_torch_is_passed_over() -> None:
    """Its misfit is the reason of every kernel of it, and the next one is chosen."""
    broken = {"flash-attn-3": Package("3.0", "was built for torch 2.8")}
    found = resolve(Gpu((9, 0), broken, lambda name: None), "attention")
    assert found.chosen == "sdpa"
    assert dict(found.rejected)["flash-attn-3"] == "was built for torch 2.8"


def test_an_import_is_tried_once_and_last() -> None:
    """Compiled parts are loaded for a case that all other rules admit, once."""
    questions: list[str] = []

    def problem(name: str) -> str:
        questions.append(name)
        return "undefined symbol"

    device = Gpu((9, 0), {"flash-attn-3": Package("3.0")}, problem)
    assert resolve(device, "attention", dropout=0.1).chosen == "sdpa"
    assert questions == []
    for _ in range(2):
        assert dict(resolve(device, "attention").rejected)["flash-attn-3"] == "undefined symbol"
    assert questions == ["flash-attn-3"]


ALL = tuple(PACKAGES)


@pytest.mark.parametrize(
    "op,packages,case,wanted",
    [
        ("adamw", (), {"dtype": "float32"}, "fused"),
        ("adamw", ALL, {"dtype": "float32"}, "apex-fused-adam"),
        ("adamw", ALL, {"dtype": "bfloat16"}, "fused"),
        ("grad_norm", (), {"dtype": "float32"}, "foreach"),
        ("grad_norm", ALL, {"dtype": "float32"}, "apex-l2norm"),
        ("layer_norm", (), {}, "torch"),
        ("layer_norm", ("apex",), {}, "apex"),
        ("layer_norm", ("liger-kernel", "transformer-engine"), {}, "torch"),
        ("layer_norm", ALL, {"compile": True}, "torch"),
        ("rms_norm", ALL, {}, "apex"),
        ("rms_norm", (), {"compile": True}, "torch"),
        ("swiglu", (), {}, "torch"),
        ("swiglu", ("liger-kernel",), {}, "liger"),
        ("swiglu", ("liger-kernel",), {"compile": True}, "torch"),
        ("cross_entropy", ("liger-kernel",), {}, "torch"),
        ("linear_cross_entropy", (), {}, "reference"),
        ("linear_cross_entropy", ("liger-kernel",), {}, "liger"),
        ("linear", ALL, {}, "cublas"),
        ("linear", ALL, {"dtype": "float64"}, "cublas"),
        ("bias_gelu", ALL, {"compile": True}, "torch"),
        ("bias_dropout_add", (), {"compile": True, "dropout": 0.1}, "torch"),
        ("scaled_masked_softmax", (), {"masked": True}, "torch"),
        ("rotary_embedding", (), {"compile": True}, "torch"),
    ],
)
def test_other_ops(op: str, packages: tuple[str, ...], case: dict[str, Any], wanted: str) -> None:
    """The other ops get the table's kernels, the same on every generation of the packages."""
    for capability in CAPABILITIES:
        if capability >= (8, 0) or not packages:
            assert resolve(gpu(capability, *packages), op, **case).chosen == wanted


@pytest.mark.parametrize("op", [name for name in SPECS if name != "attention"])
def test_deterministic(op: str) -> None:
    """With `--deterministic` a kernel that does not claim it is out."""
    impls = kernels_for(gpu((9, 0), *ALL))
    table = OpTable(OP_SPECS, impls, traits=["deterministic"])
    chosen = table.resolve(op, op_context(SPECS[op], "cuda", "float32", USUAL)).chosen
    assert chosen not in {"liger", "transformer-engine"}


@pytest.mark.parametrize(
    "package,version,least,op,kernels",
    [
        ("flash-attn", "2.4.0.post1", "2.4.1", "attention", ["flash-attn-2"]),
        ("flash-attn-4", "4.0.0b7", "4.0.0b12", "attention", ["flash-attn-4"]),
        ("liger-kernel", "0.5.2", "0.8.5", "swiglu", ["liger"]),
        ("transformer-engine", "1.13.0", "2.0", "layer_norm", ["transformer-engine"]),
    ],
)
def test_old_versions(package: str, version: str, least: str, op: str, kernels: list[str]) -> None:
    """A package before the first version that was compared says which it needs; that one fits."""
    for found in (version, least, "0.1+unknown.version!"):
        device = Gpu((9, 0), {package: Package(found)}, lambda name: None)
        resolution = resolve(device, op)
        reasons = dict(resolution.rejected)
        for kernel in kernels:
            refused = reasons.get(kernel) == f"needs `{package}` {least}, not {found}"
            assert refused == (found == version)


@pytest.mark.parametrize(
    "torch,version,reason",
    [
        ("2.13.0", "4.0.0b18", None),
        (
            "2.13.0",
            "4.0.0b19",
            "needs torch 2.14 or newer, or `flash-attn-4` before 4.0.0b19",
        ),
        ("2.14.0", "4.0.0b36", None),
        ("2.9.1", "4.0.0b36", "needs torch 2.10 or newer"),
    ],
)
def test_flash_4_in_torch(
    torch: str, version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of torch takes flash-attn-4 if it knows the number of its results."""
    monkeypatch.setattr("lmcore.contract.torch_versions._installed", lambda: torch)
    device = Gpu((10, 0), {"flash-attn-4": Package(version)}, lambda name: None)
    found = resolve(device, "attention", compile=True)
    assert dict(found.rejected).get("sdpa-fa4") == reason
    assert (found.chosen == "sdpa-fa4") == (reason is None)


def test_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook reads capability and packages from the device's facts, and adds Triton kernels."""
    seen: dict[str, Any] = {}

    def offers(device_type: str, **options: Any) -> list[OpImpl]:
        seen.update(options, device_type=device_type)
        return [OpImpl("swiglu", "triton", "a:b", priority=options["priority"])]

    module: Any = ModuleType("lmcore_triton.offers")
    module.op_impls = offers
    package = ModuleType("lmcore_triton")
    package.__spec__ = importlib.machinery.ModuleSpec("lmcore_triton", None)
    monkeypatch.setitem(sys.modules, "lmcore_triton", package)
    monkeypatch.setitem(sys.modules, "lmcore_triton.offers", module)
    facts = {"capability": "9.0", FACT: describe({"apex": Package("0.1", "broken")})}
    device: Any = SimpleNamespace(facts=facts, dtypes=frozenset({"bfloat16"}))
    found = op_impls(device)
    assert seen["device_type"] == "cuda"
    assert seen["capability"] == (9, 0)
    assert seen["dtypes"] == {"bfloat16"}
    assert found[-1].id == "triton"
    (apex,) = (kernel for kernel in found if kernel.id == "apex-fused-adam")
    assert apex.supports is not None
    verdict = apex.supports(OpContext("cuda", "float32"))
    assert verdict is not None
    assert verdict.reason == "broken"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_the_page_has_them_all(capability: tuple[int, int]) -> None:
    """Every kernel is in the documentation with its op and priority."""
    page = Path(__file__).parents[2] / "docs/reference/cuda-kernels.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    for kernel in kernels_for(gpu(capability)):
        first = kernel.id if kernel.op == "attention" else kernel.op
        cells = next(line for line in rows if line.startswith(f"| `{first}` |")).split("|")
        if kernel.op == "attention":
            assert str(kernel.priority) in re.findall(r"\d+", cells[2])
        else:
            assert f"`{kernel.id}` {kernel.priority}" in cells[2]


def test_no_torch() -> None:
    """The table itself loads no torch."""
    import subprocess

    code = (
        "import sys; from lmcore_cuda.kernels import kernels_for; "
        "from lmcore_cuda.kernel.rules import Gpu; import lmcore_cuda.plugin; "
        "import lmcore_cuda.precision; kernels_for(Gpu((9, 0), {})); "
        "sys.exit('torch' in sys.modules)"
    )
    path = ":".join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
