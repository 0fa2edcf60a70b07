"""Cases that the Triton kernels offer and decline; needs neither Triton nor a device."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmcore.contract import OP_SPECS, OpContext, OpTable
from lmcore.contract.op.records import load_target
from lmcore_triton.offers import EXPECTED, IN_COMPILED, WIDEST_NORM, op_impls

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/triton-kernels.md"
SPECS = {spec.name: spec for spec in OP_SPECS}
OPS = [impl.op for impl in op_impls("cuda")]


def table(**settings) -> OpTable:
    impls = [replace(impl, plugin="cuda", requires=()) for impl in op_impls("cuda", **settings)]
    return OpTable(OP_SPECS, impls, device_plugin="cuda")


def reason(op: str, context: OpContext, **settings) -> str | None:
    """Return why the kernel of an op is not chosen; None if it is."""
    found = table(**settings).resolve(op, context)
    return None if found.chosen == "triton" else dict(found.rejected)["triton"]


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A C compiler is found, whatever this machine has."""
    monkeypatch.setenv("CC", "cc")


def test_offers_load_neither_torch_nor_triton():
    """A plugin may ask for the table before a device is created."""
    code = (
        "import sys; from lmcore_triton.offers import op_impls; op_impls('cuda');"
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_every_kernel_is_a_function_with_the_arguments_of_its_op():
    """Each target is in its module, with the names and the order of the reference."""
    import lmcore_triton

    (folder,) = lmcore_triton.__path__
    for impl in op_impls("cuda"):
        module, _, name = impl.load.partition(":")
        text = (Path(folder) / f"{module.partition('.')[2]}.py").read_text(encoding="utf-8")
        (found,) = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        arguments = [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]
        reference = inspect.signature(load_target(SPECS[impl.op].reference))
        assert arguments == list(reference.parameters), impl.load


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_kernel_is_chosen_where_nothing_is_against_it(op, dtype):
    """Each dtype that a run computes in is done, in eager mode, also where sizes are left open."""
    assert reason(op, OpContext("cuda", dtype)) is None


@pytest.mark.parametrize(
    "context,settings,word",
    [
        (OpContext("cuda", "float64"), {}, "computes in float32"),
        (OpContext("xpu", "float32"), {}, "is for `cuda`, not `xpu`"),
        (OpContext("cuda", "bfloat16"), {"dtypes": ("float32",)}, "does not compute in bfloat16"),
        (
            OpContext("cuda", "float32"),
            {"capability": (7, 5)},
            "8.0 and newer, this device has 7.5",
        ),
        (OpContext("cuda", "float32", {"compile": True}), {}, "not for compiled blocks"),
        (OpContext("cuda", "float32", {"hidden_size": WIDEST_NORM + 1}), {}, "keeps a row"),
    ],
    ids=["float64", "device", "dtype", "capability", "compile", "row"],
)
def test_what_is_declined_has_a_reason(context, settings, word):
    """A case that the kernel is not for is declined in words that say why."""
    assert word in reason("layer_norm", context, **settings)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_newer_devices_are_served(capability):
    """A compute capability that Triton compiles for is no reason against a kernel."""
    assert reason("layer_norm", OpContext("cuda", "bfloat16"), capability=capability) is None


def test_without_a_c_compiler_nothing_is_offered(monkeypatch):
    """No kernel is offered, because Triton compiles its launchers at the first call."""
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "needs a C compiler" in reason("swiglu", OpContext("cuda", "float32"))


def test_without_triton_the_reference_is_bound(monkeypatch):
    """The reasons name the missing package."""
    monkeypatch.setattr("lmcore.contract.op.records._is_installed", lambda name: False)
    found = OpTable(OP_SPECS, op_impls("cuda")).resolve("swiglu", OpContext("cuda", "float32"))
    assert found.rejected == (("triton", "needs `triton`, not installed"),)


@pytest.mark.parametrize("op", OPS)
def test_compiled_blocks_get_what_is_listed(op):
    """Beside a compiler only the kernels that are expected to win are offered; a plugin can say."""
    compiled = OpContext("cuda", "bfloat16", {"compile": True})
    assert (reason(op, compiled) is None) == (op in IN_COMPILED)
    assert reason(op, compiled, in_compiled={op}) is None


def test_priorities_are_the_plugins_own():
    """The plugin places the kernels among its others; the head goes further up."""
    assert {impl.priority for impl in op_impls("cuda", priority=16)} == {16, 26}
    ahead = [impl.op for impl in op_impls("cuda") if impl.priority > 10]
    assert ahead == ["linear_cross_entropy"]


def test_the_page_has_every_kernel_and_its_expectation():
    """The reference page has the table's text for each kernel."""
    rows = dict(
        line.strip("|").split("|", 1)
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| [`")
    )
    listed = {key.split("`")[1]: value.strip() for key, value in rows.items()}
    assert list(listed) == list(EXPECTED) == OPS
    for op, text in EXPECTED.items():
        assert listed[op].endswith(text), op
