"""Kernels of Intel's extension for PyTorch on the CPU: recognised, refused, and correct."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lmcore.contract import CheckStatus, OpContext, Reject, torch_build
from lmcore.contract.op import reference
from lmcore_cpu import doctor, ipex, kernels

RELEASE = ".".join(torch_build("cpu").version.split(".")[:2])
FITS = ipex.misfit() is None
needs_ipex = pytest.mark.skipif(not FITS, reason=f"{ipex.misfit()}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that installs a package of a version, with an empty library or with none."""
    folder = tmp_path / "intel_extension_for_pytorch"

    def install(version: str | None, *, library: bytes | None = b"") -> None:
        (folder / "lib").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('it is not to be imported')\n")
        if version is not None:
            (folder / "_version.py").write_text(f'__version__ = "{version}"\n')
        if library is not None:
            (folder / "lib/libintel-ext-pt-cpu.so").write_bytes(library)

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)
    return install


@pytest.mark.parametrize(
    "version, library, reason",
    [
        (f"{RELEASE}.0+cpu", b"", None),
        (f"{RELEASE}.0+xpu", b"", f"{RELEASE}.0+xpu is not a build for CPUs"),
        ("2.7.10+cpu", b"", "2.7.10+cpu is for torch 2.7, and torch"),
        (f"{RELEASE}.0+cpu", None, "lacks its file `lib/libintel-ext-pt-cpu.so`"),
        (None, b"", "of an unknown version is not a build for CPUs"),
    ],
)
def test_a_build_is_judged_by_its_files(
    package: Any, version: str | None, library: bytes | None, reason: str | None
) -> None:
    """Neither torch's operators nor the package are loaded for it."""
    package(version, library=library)
    found = ipex.misfit()
    assert (found is None) if reason is None else (reason in (found or "")), found
    impls = [impl for impl in kernels.kernels() if impl.id == "ipex"]
    assert {impl.op for impl in impls} == {"rms_norm", "rotary_embedding"}
    for impl in impls:
        assert impl.supports is not None
        answer = impl.supports(OpContext("cpu", "float32"))
        assert answer == (None if reason is None else Reject(str(found)))


def test_a_truncated_library_is_not_loaded(package: Any, tmp_path: Path) -> None:
    """Its size differs from the installer's record; loading it would end the process."""
    package(f"{RELEASE}.0+cpu", library=b"12345")
    record = tmp_path / "intel_extension_for_pytorch-1.dist-info/RECORD"
    record.parent.mkdir()
    line = "intel_extension_for_pytorch/lib/libintel-ext-pt-cpu.so,sha256=x,{}\n"
    record.write_text("a.py,,\n" + line.format(5))
    assert ipex.misfit() is None
    record.write_text("a.py,,\n" + line.format(2_000))
    assert "is damaged: its file `lib/libintel-ext-pt-cpu.so` has 5 of 2,000 bytes" in str(
        ipex.misfit()
    )
    with pytest.raises(ImportError, match="is damaged"):
        ipex.load_operators()
    (check,) = doctor._extension()
    assert (check.status, check.fix is None) == (CheckStatus.WARNING, False)
    assert "is damaged" in check.detail


@pytest.mark.skipif(ipex.package() is not None, reason="it is installed")
def test_nothing_is_offered_without_the_package() -> None:
    assert ipex.misfit() == "needs `intel-extension-for-pytorch`, not installed"
    assert "ipex" not in {impl.id for impl in kernels.kernels()}


def test_a_library_that_cannot_be_loaded_shows_its_error(package: Any) -> None:
    package(f"{RELEASE}.0+cpu", library=b"not a library")
    with pytest.raises(ImportError, match=r"file too short|invalid ELF"):
        ipex.load_operators()


@pytest.mark.parametrize(
    "dtype, attributes, reason",
    [
        ("float16", {}, "computes in float32 and bfloat16, not float16"),
        ("float32", {"compile": True}, "is not for compiled blocks"),
    ],
)
def test_cases_that_it_refuses(dtype: str, attributes: dict[str, Any], reason: str) -> None:
    supports = kernels.IPEX_KERNELS[0].supports
    assert supports is not None
    answer = supports(OpContext("cpu", dtype, attributes))
    assert answer is not None
    assert reason in answer.reason


def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """Return the result for leaves of these values, and their gradients, in float64."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    return [value.double() for value in (out.detach(), *(leaf.grad for leaf in leaves))]


@needs_ipex
def test_doctor_loads_the_library() -> None:
    (check,) = doctor._extension()
    assert check.status is CheckStatus.OK
    assert "+cpu, kernels for RMS norm" in check.detail


@needs_ipex
def test_the_library_is_loaded_without_a_notice() -> None:
    """Other text on stderr is kept."""
    script = """
import os, torch
from lmcore_cpu import ipex

def load_library(path, load=torch.ops.load_library):
    os.write(2, b"before\\n")
    load(path)
    os.write(2, b"after\\n")

torch.ops.load_library = load_library
ipex.load_operators()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "before\nafter\n"


@needs_ipex
def test_norms_that_the_library_replaces() -> None:
    """Torch neither warns of wrong gradients (a warning is an error here), nor are they wrong.

    Autocast treats them as before, and a dispatch mode, as of selective recompute, sees the same.
    """
    ipex.load_operators()
    x, weight, bias = torch.randn(2, 6, 8), torch.randn(8), torch.randn(8)
    exact = [value.double() for value in (x, weight, bias)]

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (8,), weight, bias)

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.group_norm(x.transpose(1, 2), 2, weight, bias)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return op(*args, **(kwargs or {}))

    for norm, mode in itertools.product((layer_norm, group_norm), (nullcontext, Watch)):
        with mode():
            found = gradients(norm, x, weight, bias)
        for ours, wanted in zip(found, gradients(norm, *exact), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert group_norm(x, weight, bias).dtype == torch.float32


@needs_ipex
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 8)])
def test_layer_norm_is_that_of_torch(shape: tuple[int, ...]) -> None:
    """IPEX's fails without elements and gradients, as in validation on a rank without tokens."""
    ipex.load_operators()
    x, weight, bias = torch.randn(shape), torch.randn(8), torch.randn(8)
    with torch.no_grad():
        found = functional.layer_norm(x, (8,), weight, bias, 1e-3)
    assert torch.equal(found, torch.native_layer_norm(x, (8,), weight, bias, 1e-3)[0])


@needs_ipex
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 7), (2, 3, 4, 33), (2, 3, 1), (0, 3, 8)])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], dtypes: tuple[str, str]) -> None:
    """The operator itself gives no gradient, and says nothing."""
    from lmcore_cpu.kernel.ipex import rms_norm

    x, weight = torch.randn(*shape), torch.randn(shape[-1])
    x, weight = (v.to(getattr(torch, name)) for v, name in zip((x, weight), dtypes, strict=True))
    found = gradients(lambda x, weight: rms_norm(x, weight, 1e-5), x, weight)
    wanted = gradients(
        lambda x, weight: reference.rms_norm(x, weight, 1e-5), x.double(), weight.double()
    )
    narrow = "bfloat16" in dtypes
    for ours, exact in zip(found, wanted, strict=True):
        limit = 3e-2 if narrow else 2e-5
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


@needs_ipex
def test_rms_norm_of_inputs_with_gaps() -> None:
    """The operator itself reads inputs and gain as if they were contiguous."""
    from lmcore_cpu.kernel.ipex import rms_norm

    x, weight = torch.randn(3, 16)[:, ::2], torch.randn(16)[::2]
    found = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-5))


@needs_ipex
@pytest.mark.parametrize("batch_first", [True, False], ids=["dense", "as attention has it"])
@pytest.mark.parametrize("channels, pairs", [(64, 32), (64, 16), (80, 20), (12, 5), (2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_and_its_gradient(
    channels: int, pairs: int, dtype: str, *, batch_first: bool
) -> None:
    from lmcore_cpu.kernel.ipex import rotary_embedding

    shape = (2, 3, 5, channels) if batch_first else (2, 5, 3, channels)
    x = torch.randn(*shape).to(getattr(torch, dtype))
    x = x if batch_first else x.transpose(1, 2)
    angles = torch.randn(5, pairs)
    cos, sin = angles.cos(), angles.sin()
    before = x.clone()
    found = gradients(lambda x: rotary_embedding(x, cos, sin), x)
    assert torch.equal(x, before)
    wanted = gradients(
        lambda x: reference.rotary_embedding(x, cos.double(), sin.double()), x.double()
    )
    for ours, exact in zip(found, wanted, strict=True):
        limit = 1e-2 if dtype == "bfloat16" else 1e-5
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)
