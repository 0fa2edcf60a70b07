"""Calls of kernel packages, compared with the record of the packages' sources.

`package_sources.toml` is the record.  The kernels run with stand-ins of the packages, and each call
of a recorded function is bound to all its recorded declarations.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.contract.torch_versions import ATTENTION_KERNELS, ATTENTION_RESULTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = tomllib.loads((HERE / "package_sources.toml").read_text(encoding="utf-8"))
CASES = [
    pytest.param(function, folder, id=f"{folder}-{function['name']}")
    for function in RECORD["function"]
    for folder in function["modules"]
]


def from_file(path: Path) -> Any:
    """Return the module of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernel_cases = from_file(ROOT / "tests/unit/contract/kernel_cases.py")


def declared(source: dict[str, str]) -> inspect.Signature:
    """Return the recorded signature; a default `...` means any."""
    return inspect.signature(eval(f"lambda {source['parameters'][1:-1]}: None"))


def matches(value: Any, expected: Any, own: dict[str, Any]) -> bool:
    """Return True if an argument is what the record says; *own* are the kernel's arguments."""
    if expected == "computed":
        return True
    if expected == "None":
        return value is None
    if isinstance(expected, str) and expected.startswith("op."):
        expected = own[expected.removeprefix("op.")]
    if not isinstance(expected, torch.Tensor):
        value = list(value) if isinstance(value, tuple) else value
        return type(value) is type(expected) and value == expected
    if value.data_ptr() == expected.data_ptr():
        return True
    return torch.equal(value.detach().float().flatten(), expected.detach().float().flatten())


def own_arguments(op: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of a kernel, by name."""
    if op == "adamw":
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")
        return dict(zip(names, kernel_cases.state(), strict=True)), kernel_cases.HOW
    if op == "grad_norm":
        return {"grads": [kernel_cases.draw(5), kernel_cases.draw(3, 4)]}, {}
    if op == "attention":
        names = ("q_BNSD", "k_BKTD", "v_BKTD")
        return dict(zip(names, kernel_cases.attention_inputs(dtype), strict=True)), {"causal": True}
    values, how = kernel_cases.arguments(op)
    values = kernel_cases.cast(op, values, dtype, all_of=op.startswith("linear"))
    return dict(zip(kernel_cases._names(op, len(values)), values, strict=True)), how


def check_calls(
    function: dict[str, Any],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[[str], ModuleType] = importlib.import_module,
) -> None:
    """Run the kernel, and raise an error if it calls the function otherwise than recorded."""
    op = function["kernel"].partition(":")[2]
    dtype = getattr(torch, function.get("dtype", "float32"))
    args, how = own_arguments(op, dtype)
    if "op.dropout" in function["arguments"].values():
        how = {**how, "dropout": 0.125}
    leaves = {
        name: value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in args.items()
    }
    calls = []

    def spy(*passed: Any, **named: Any) -> Any:
        for source in function["sources"]:
            bound = declared(source).bind(*passed, **named).arguments
            assert set(bound) == set(function["arguments"])
            wrong = {
                name: value
                for name, value in bound.items()
                if not matches(value, function["arguments"][name], {**args, **how})
            }
            assert wrong == {}
        calls.append(function["name"])
        return original(*passed, **named)

    if function["package"] == "transformer-engine":
        importlib.import_module("transformer_engine.pytorch")
    module = importlib.import_module(function["modules"][folder])
    name, _, method = function["name"].partition(".")
    original = getattr(module, name)
    if method:
        original = getattr(original, method)
    monkeypatch.setattr(module, name, SimpleNamespace(**{method: spy}) if method else spy)
    kernel_module, _, kernel = function["kernel"].partition(":")
    out = getattr(load(kernel_module), kernel)(*leaves.values(), **how)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.float().sum().backward()
    assert calls


@pytest.mark.parametrize("function,folder", CASES)
def test_calls(
    function: dict[str, Any], folder: str, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recorded function gets the recorded arguments, whichever declaration it has."""
    install(folder)
    check_calls(function, folder, monkeypatch)


@pytest.mark.parametrize("function,folder", CASES)
def test_stand_ins(function: dict[str, Any], folder: str, install: Any) -> None:
    """A stand-in has the names and defaults of the newest declaration."""
    install(folder)
    if function["package"] == "transformer-engine":
        importlib.import_module("transformer_engine.pytorch")
    name, _, method = function["name"].partition(".")
    found = getattr(importlib.import_module(function["modules"][folder]), name)
    parameters = list(inspect.signature(found.forward if method else found).parameters.values())
    wanted = list(declared(function["sources"][-1]).parameters.values())
    assert [parameter.name for parameter in parameters[bool(method) :]] == [
        parameter.name for parameter in wanted
    ]
    for mine, theirs in zip(parameters[bool(method) :], wanted, strict=True):
        assert mine.default == theirs.default or theirs.default is ...


WRONG = [
    (
        "kernel.apex",
        "(lr, beta1, beta2, epsilon,",
        "(lr, beta2, beta1, epsilon,",
        "multi_tensor_adam",
    ),
    (
        "kernel.apex",
        "_DECOUPLED, 1, weight_decay)",
        "_DECOUPLED, weight_decay)",
        "multi_tensor_adam",
    ),
    ("kernel.apex", "_DECOUPLED, 1, weight_decay)", "1, 0, weight_decay)", "multi_tensor_adam"),
    ("kernel.apex", "[tensors], False)", "[tensors], False, 2)", "multi_tensor_l2norm"),
    (
        "kernel.apex",
        "weight_H, bias_H, weight_H.shape, epsilon",
        "bias_H, weight_H, weight_H.shape, epsilon",
        "FusedLayerNormAffineFunction.apply",
    ),
    (
        "kernel.apex",
        "weight_H, weight_H.shape, epsilon",
        "weight_H, epsilon, weight_H.shape",
        "FusedRMSNormAffineFunction.apply",
    ),
    ("kernel.liger", "epsilon, 0.0, _IN", "epsilon, _IN", "LigerRMSNormFunction.apply"),
    (
        "kernel.liger",
        "copy_TV, target_T, None,",
        "copy_TV, target_T,",
        "LigerCrossEntropyFunction.apply",
    ),
    (
        "kernel.transformer_engine",
        "epsilon,\n            None,",
        "epsilon,",
        "layernorm_fwd",
    ),
    (
        "kernel.transformer_engine",
        "x_RH, scale_R, weight_H, _ALL",
        "x_RH, weight_H, scale_R, _ALL",
        "rmsnorm_bwd",
    ),
    ("attention.flash2", "dropout_p=dropout", "dropout=dropout", "flash-attn"),
    ("attention.flash2", "causal=causal,\n        det", "det", "flash-attn"),
    ("attention.flash", "*views, causal=causal)", "*views, causal)", "flash-attn-3"),
    ("attention.flash", "*views, causal=causal)", "*views, is_causal=causal)", "flash-attn-4"),
]
"""Module of the plugin, correct and wrong text, and the function or package that is called so."""


@pytest.mark.parametrize("name,right,wrong,called", WRONG)
def test_a_wrong_call_is_found(
    name: str,
    right: str,
    wrong: str,
    called: str,
    install: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A changed order, a missing and a misspelt argument are errors of the check above."""
    (function,) = (each for each in RECORD["function"] if called in {each["name"], each["package"]})
    folder = next(iter(function["modules"]))
    install(folder)
    spec = importlib.util.find_spec(f"lmcore_cuda.{name}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    assert right in text

    def load(kernel_module: str) -> ModuleType:
        changed = ModuleType(spec.name)
        monkeypatch.setitem(sys.modules, spec.name, changed)
        exec(compile(text.replace(right, wrong), spec.origin, "exec"), vars(changed))
        return importlib.import_module(kernel_module)

    with pytest.raises((AssertionError, TypeError)):
        check_calls(function, folder, monkeypatch, load)


PACKAGES = {
    function["modules"][folder].partition(".")[0]
    for function in RECORD["function"]
    for folder in function["modules"]
} | {"transformer_engine"}


def used_names(path: Path) -> Iterator[str]:
    """Yield the names that a file takes from modules of the packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    modules.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            names = {alias.asname or alias.name for alias in node.names}
            modules |= names & {"amp_C"}
            yield from names - {"amp_C"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield node.attr


def test_every_use_is_recorded() -> None:
    """The plugin uses no name of a package that is not recorded; other plugins use none."""
    found = {
        path: set(used_names(path))
        for folder in ("plugins", "plugins_cuda", "plugins_xpu")
        for path in (ROOT / folder).rglob("src/**/*.py")
    }
    assert {path.name for path, names in found.items() if names} == {
        *("apex.py", "liger.py", "transformer_engine.py", "flash2.py", "flash3.py", "flash4.py"),
    }
    recorded = {
        entry["name"].partition(".")[0]
        for kind in ("function", "constant")
        for entry in RECORD[kind]
    }
    assert set().union(*found.values()) == recorded


def test_the_page_names_the_sources() -> None:
    """The documentation has every recorded commit and release."""
    page = (ROOT / "docs/reference/cuda-kernels.md").read_text(encoding="utf-8")
    for function in RECORD["function"]:
        for source in function["sources"]:
            commit = source.get("commit", "")[:7]
            assert (commit or source["release"].partition("==")[2]) in page
        for release in function.get("callers", ()):
            assert release.partition("==")[2] in page


@pytest.mark.parametrize("default", ["llama", "gemma"])
def test_a_release_is_compared(
    default: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The script finds that the declaration in a wheel is another than the recorded one."""
    script = from_file(HERE / "compare_package_sources.py")
    wheel = tmp_path / "liger_kernel-0.8.5-py3-none-any.whl"
    text = f"""
class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps: float, offset=0.0, casting_mode={default!r}, in_place=True,
                row_mode=None):
        return X
"""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("layer_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"):
            archive.writestr(f"liger_kernel/ops/{name}.py", "")
        archive.writestr("liger_kernel/ops/rms_norm.py", text)
    monkeypatch.setattr(sys, "argv", ["compare", str(wheel)])
    assert script.main() == 1  # the other functions are not there
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "LigerRMSNormFunction" in line)
    assert line.endswith("as recorded") == (default == "llama")
    assert sum("found None" in line for line in lines) == 4


@pytest.mark.skipif(not ATTENTION_KERNELS, reason="this torch registers no other kernels")
def test_results_that_torch_takes() -> None:
    """The call of flash-attn-4 by torch takes more than two results if its version says so."""
    spec = importlib.util.find_spec("torch.nn.attention._fa4")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (targets,) = (
        node.targets
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "_flash_attn_fwd(" in ast.unparse(node.value)
    )
    assert ("*" in ast.unparse(targets[0])) == bool(ATTENTION_RESULTS)
