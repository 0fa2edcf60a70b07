"""The kernels of Intel's extension (IPEX) against the references in float64, gradients included.

Each test runs with a stand-in that has the package's signatures, and with the real package if it is
installed for this torch: the functions that the plugin calls choose by the device of their inputs,
so its build for CPUs computes them here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lmcore.base.errors import PluginError
from lmcore.contract import OP_SPECS, OpTable, torch_build
from lmcore.contract.op import reference
from lmcore.contract.op.context import op_context
from lmcore.contract.op.packages import Package, UsablePackages, distribution_of
from lmcore_xpu import kernels, packages
from lmcore_xpu.packages import EXTENSION, PACKAGES

_SPEC = importlib.util.spec_from_file_location(
    "kernel_cases", Path(__file__).parents[2] / "tests/unit/contract/kernel_cases.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
kernel_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_cases)

FAKES = Path(__file__).parent / "fakes"
OPS = ("layer_norm", "rms_norm", "rotary_embedding", "swiglu")
SIGNATURES = {
    "fast_layer_norm": "(hidden_states, normalized_shape, weight, bias, eps)",
    "rms_norm": "(hidden_states, weight, eps)",
    "rotary_embedding": "(query, key, sin, cos, rotary_dim, rotary_half, position_ids=None)",
    "silu_mul": "(x, y, out=None)",
}
"""The functions that the plugin calls, as IPEX 2.8 declares them, without annotations."""


def misfit() -> str | None:
    """Return why the real package cannot be used here, from its metadata."""
    distribution = distribution_of(PACKAGES[EXTENSION])
    if distribution is None:
        return f"needs `{EXTENSION}`"
    version = packages._own_version(distribution)
    return packages._of_another_torch(EXTENSION, version, torch_build("cpu"), "")


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param("real", marks=pytest.mark.skipif(misfit() is not None, reason=str(misfit()))),
    ]
)
def module(request: pytest.FixtureRequest) -> ModuleType:
    """The plugin's kernels, with a stand-in or with the real package."""
    if request.param == "stand-in":
        request.getfixturevalue("install")("extension")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module("lmcore_xpu.kernel.ipex")
    assert (FAKES in Path(found.ipex.__file__).parents) == (request.param == "stand-in")
    return found


@pytest.fixture(autouse=True)
def eager() -> Any:
    """On a CPU the package's `silu_mul` is compiled by torch: run it without the compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_the_package_has_the_functions(module: Any, name: str) -> None:
    found = inspect.signature(getattr(module.ipex, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(inspect.Signature(plain)) == SIGNATURES[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: str, dtype: torch.dtype, module: Any) -> None:
    """Norms take rows of the gain's dtype; the rotation here leaves some channels as they are."""
    kernel_cases.compare(op, getattr(module, op), dtype)


@pytest.mark.parametrize("op", OPS)
def test_inputs_that_are_views(op: str, module: Any) -> None:
    """An input of another layout gives the same values, and is not changed."""
    values, _ = kernel_cases.arguments(op)
    x = values[0].transpose(0, 1)
    before = x.clone()
    found = getattr(module, op)(x, *values[1:])
    torch.testing.assert_close(found, getattr(reference, op)(x, *values[1:]))
    assert torch.equal(x, before)


@pytest.mark.parametrize("op", OPS)
def test_inputs_with_gaps(op: str, module: Any) -> None:
    """Values in every second place of a buffer, weights' too, give the same results."""
    values, _ = kernel_cases.arguments(op)
    spread = [
        torch.stack((value, torch.full_like(value, 1e6)), -1).flatten(-2)[..., ::2]
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
    wanted = getattr(reference, op)(*values)
    torch.testing.assert_close(getattr(module, op)(*spread), wanted)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(op: str, module: Any) -> None:
    """Nothing is computed, and the gradients of weights are zero: a rank may have no tokens."""
    (x, *others), _ = kernel_cases.arguments(op)
    out, *grads = kernel_cases.run(getattr(module, op), [x[:0], *others], {})
    assert out.shape == getattr(reference, op)(x[:0], *others).shape
    found = [grad for grad in grads if grad is not None]
    assert len(found) == sum(isinstance(value, torch.Tensor) for value in (x, *others))
    assert not any(grad.any() for grad in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_first", [True, False], ids=["heads first", "as attention has it"])
@pytest.mark.parametrize(
    "batch, heads, channels, pairs",
    [(1, 1, 16, 8), (3, 1, 16, 8), (1, 2, 64, 32), (2, 3, 64, 16), (2, 4, 12, 5), (0, 2, 8, 4)],
)
def test_rotation_and_its_gradient(
    module: Any,
    batch: int,
    heads: int,
    channels: int,
    pairs: int,
    dtype: torch.dtype,
    *,
    heads_first: bool,
) -> None:
    """The package rotates a query and a key in place; here one tensor is, and stays unchanged."""
    shape = (batch, heads, 5, channels) if heads_first else (batch, 5, heads, channels)
    x = kernel_cases.draw(*shape).to(dtype)
    x = x if heads_first else x.transpose(1, 2)
    before = x.clone()
    angles = kernel_cases.draw(5, pairs)
    weights = kernel_cases.draw(batch, heads, 5, channels, seed=1)
    results = []
    for function, wide in ((module.rotary_embedding, x), (reference.rotary_embedding, x.double())):
        leaf = wide.detach().requires_grad_()
        out = function(leaf, angles.cos(), angles.sin())
        (out * weights.to(out.dtype)).sum().backward()
        results.append((out.detach().double(), leaf.grad.double()))
    assert torch.equal(x, before)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise ImportError('libze_loader.so.1: cannot open')", "ImportError: libze_loader.so.1"),
        ("print('ERROR! needs PyTorch 2.8')\nraise SystemExit(127)", "SystemExit: 127"),
    ],
    ids=["library", "another torch"],
)
def test_a_package_whose_import_fails_shows_its_error(
    code: str, reason: str, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is imported when a kernel of it is bound: the user asked for it, and the run stops."""
    del install  # the real package is put aside
    folder = tmp_path / "broken" / "intel_extension_for_pytorch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(folder.parent)
    usable = UsablePackages({EXTENSION: Package("2.8.10+xpu")}, lambda name: None)
    impls = [impl for impl in kernels.kernels_for(usable) if impl.id == "ipex"]
    spec = next(spec for spec in OP_SPECS if spec.name == "rms_norm")
    context = op_context(spec, "xpu", "bfloat16", {"hidden_size": 64, "compile": False})
    with pytest.raises(PluginError) as caught:
        OpTable(OP_SPECS, impls).bind("rms_norm", context)
    assert reason in str(caught.value.why)
    assert "--ops rms_norm=reference" in str(caught.value.hint)
    assert "lmcore_xpu.kernel.ipex" not in sys.modules
