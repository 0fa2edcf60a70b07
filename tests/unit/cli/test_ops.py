"""`lmcore ops`: what is listed, what is explained, and what an extension's kernels do to both."""

from __future__ import annotations

import json
import re
import sys

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli import ops
from lmcore.cli.main import main
from lmcore.config.option import options_of
from lmcore.contract import OP_SPECS, OpAttributes
from lmcore.contract.op.context import attribute_options
from lmcore.contract.torch_versions import GROUPED_CPU_ATTENTION

EXTENSION = """
from lmcore.contract import OpImpl, PluginInfo, Reject
from lmcore.hookspecs import hookimpl

def small(context):
    return None if context.attributes["head_dim"] <= 64 else Reject("heads of 64 at most")

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("addition", ">=1,<2", summary="kernels alone")

@hookimpl
def lmcore_op_impls():
    kernel = "lmcore.contract.op.reference"
    return [
        OpImpl("attention", "small", f"{kernel}:attention", priority=20, supports=small),
        OpImpl("attention", "needy", f"{kernel}:attention", priority=30, requires=("nonesuch",)),
        OpImpl("rms_norm", "gone", "nonesuch:rms_norm", priority=20),
        OpImpl("layer_norm", "twin", f"{kernel}:layer_norm"),
    ]
"""


@pytest.fixture(autouse=True)
def only_the_cpu(monkeypatch):
    """Leave out other plugins that are installed here."""
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    monkeypatch.delenv("LMCORE_DEVICE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("GOMP_SPINCOUNT", "2000")  # a command sets it for its own process


def printed(capsys, *argv):
    assert ops.run(list(argv)) == 0
    return capsys.readouterr().out


@pytest.fixture
def extended(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command with a plugin of kernels installed."""
    (tmp_path / "addition_plugin.py").write_text(EXTENSION, encoding="utf-8")
    info = tmp_path / "lmcore_addition-0.3.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: lmcore-addition\nVersion: 0.3\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[lmcore.plugins]\naddition = addition_plugin\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LMCORE_PLUGINS", "addition")
    yield lambda *argv: printed(capsys, *argv)
    sys.modules.pop("addition_plugin", None)


def test_every_op_is_listed_with_all_that_is_declared(capsys):
    """Schema, summary, tolerances, gradients, attributes and kernels of each op are listed."""
    text = printed(capsys, "list")
    for spec in OP_SPECS:
        (part,) = [one for one in text.split("\n\n") if one.startswith(f"{spec.name}: ")]
        flat = " ".join(part.split())
        assert spec.summary in flat
        assert f"{spec.name}{spec.schema}" in flat
        assert f"gradients: {', '.join(spec.gradients) or 'none'}" in flat
        assert f"attributes: {', '.join(spec.attributes) or 'none'}" in flat
        for name, one in spec.tolerances.items():
            assert f"{name} {one.absolute:g} + {one.relative:g}" in flat
        assert "reference lmcore" in flat
    assert "sdpa cpu 10 deterministic, fused" in " ".join(text.split())


def test_the_list_as_json(capsys):
    """Scripts get the same facts."""
    found = json.loads(printed(capsys, "list", "--json"))
    assert found["device"]["type"] == "cpu"
    assert [one["name"] for one in found["ops"]] == [spec.name for spec in OP_SPECS]
    attention = found["ops"][0]
    assert attention["gradients"] == ["q_BNSD", "k_BKSD", "v_BKSD"]
    assert attention["tolerances"]["bfloat16"] == {"absolute": 0.04, "relative": 0.04}
    (sdpa,) = [one for one in attention["kernels"] if one["id"] == "sdpa"]
    function = "attention" if GROUPED_CPU_ATTENTION else "attention_expanded"
    assert sdpa == {
        "id": "sdpa",
        "plugin": "cpu",
        "priority": 10,
        "traits": ["deterministic", "fused", "score_bias", "score_bias_gradient"],
        "requires": {},
        "load": f"lmcore.contract.op.torch_kernels:{function}",
    }


def test_some_ops_are_listed(capsys):
    """Names after the command choose, in their order."""
    found = json.loads(printed(capsys, "list", "swiglu", "linear", "--json"))
    assert [one["name"] for one in found["ops"]] == ["swiglu", "linear"]


@pytest.fixture
def blas(give_facts):
    """Say which product is faster on this processor: True for torch's BLAS."""

    def say(*, is_faster: bool) -> None:
        give_facts(mkl=True, prefers_mkl=is_faster, onednn=True)

    return say


def test_a_case_is_explained(capsys, blas):
    """The choice, its reason, and why each other kernel was not chosen."""
    blas(is_faster=False)
    text = printed(capsys, "explain", "linear", "--dtype", "fp32", "--in-features", "8")
    assert "linear on cpu, float32" in text
    assert "in_features 8, bias yes, compile no" in text
    assert "not specified: --out-features" in text
    assert "* onednn " in text
    assert "chosen: highest priority among the kernels that support this case" in text
    assert "is for compiled blocks; `onednn` is the same without a compiler" in text
    assert "`onednn` supports the case" in text


def test_attention_with_alibi_is_explained(capsys):
    """The kernel that adds a bias, and the reason against one that does not."""
    words = ("explain", "attention", "--dtype", "fp32", "--head-dim", "64", "--score-bias")
    text = " ".join(printed(capsys, *words).split())
    assert "score_bias yes" in text
    assert "* sdpa " in text
    assert "adds no bias to the scores: it does not claim the trait `score_bias`" in text
    plain = printed(capsys, *words[:-1])
    assert "* native " in plain or "* blocked " in plain  # as the processor has kernels
    assert "adds no bias" not in plain
    assert "--score-bias" not in plain
    assert main(["ops", *words, "--strict-ops", "--ops", "attention=reference"]) == 2
    assert "`--strict-ops`: op `attention` has no kernel" in capsys.readouterr().err


def test_attention_with_relative_positions_is_explained(capsys):
    """The kernel that gives the gradient of a bias is named, and `--strict-ops` asks for one."""
    words = ("explain", "attention", "--dtype", "bf16", "--score-bias", "--score-bias-gradient")
    text = " ".join(printed(capsys, *words).split())
    assert "score_bias yes, score_bias_gradient yes" in text
    assert "* sdpa " in text
    assert "--score-bias-gradient" not in printed(capsys, *words[:-1])
    assert main(["ops", *words, "--strict-ops", "--ops", "attention=reference"]) == 2
    assert "`--strict-ops`: op `attention` has no kernel" in capsys.readouterr().err


def test_the_processor_decides(capsys, blas):
    """The product that is slower on this processor is chosen only if it is preferred."""
    blas(is_faster=True)
    text = printed(capsys, "explain", "linear", "--dtype", "fp32")
    assert "* torch " in text
    assert "`torch` has priority 15, this 10" in text
    text = printed(capsys, "explain", "linear", "--dtype", "fp32", "--ops", "linear=onednn")
    assert "* onednn " in text


def test_wishes_decide_as_in_a_run(capsys, blas):
    """`--ops` and `--compile` reach the table."""
    blas(is_faster=False)
    text = printed(capsys, "explain", "attention", "--ops", "attention=reference")
    assert "* reference" in text
    assert "chosen: no kernel supports this case" not in text
    assert "chosen: preferred by --ops" in text
    found = json.loads(printed(capsys, "explain", "linear", "--compile", "--json"))
    assert (found["chosen"], found["source"]) == ("onednn-compile", "priority")
    assert found["attributes"] == {"bias": True, "compile": True}
    assert found["error"] is None
    ids = [one["id"] for one in found["kernels"]]
    assert ids == ["bfloat16", "bfloat16-compile", "onednn", "onednn-compile", "torch"]


@pytest.mark.parametrize("op", ["attention", "adamw"])
def test_the_dtype_is_the_default_precisions(op, capsys):
    """Without `--dtype` the case has the dtype of a run without `--precision`."""
    assert json.loads(printed(capsys, "explain", op, "--json"))["dtype"] == "float32"


def test_a_dtype_that_the_device_lacks_is_reported(capsys, monkeypatch):
    """A case that no run would have is answered all the same, with a word about it."""
    monkeypatch.setattr("lmcore_cpu.device._DTYPES", frozenset({"float32"}))
    assert "device `cpu` does not compute in float16" in printed(
        capsys, "explain", "adamw", "--dtype", "fp16"
    )


def test_strict_fails_after_the_explanation(capsys):
    """The reasons are printed, and the exit status equals a run's."""
    assert main(["ops", "explain", "linear", "--dtype", "fp16", "--strict-ops"]) == 2
    out, err = capsys.readouterr()
    assert "no kernel supports this case, and --strict-ops refuses the reference" in out
    assert "`--strict-ops`: op `linear` has no kernel" in err


@pytest.mark.parametrize(
    "argv, what, hint",
    [
        (["lits"], "unknown command `lmcore ops lits`", "did you mean `list`"),
        (["explain", "linera"], "unknown op `linera`", "did you mean `linear`"),
        (["list", "linear", "swiglou"], "unknown op `swiglou`", "did you mean `swiglu`"),
        (["explain"], "missing argument `name`", None),
        (["explain", "linear", "--dtype", "bf61"], "`--dtype bf61`", "did you mean `bf16`"),
        (["explain", "linear", "--head-dim", "8"], "not depend on `--head-dim`", "--in-features"),
        (["explain", "adamw", "--compile"], "not depend on `--compile`", "nothing but the dtype"),
        (
            ["explain", "linear", "--ops", "linear=onednm"],
            "no such kernel",
            "did you mean `onednn`",
        ),
        (["explain", "linear", "--in-features", "0"], "out of range", None),
    ],
)
def test_errors_have_a_fix(argv, what, hint):
    """A misspelt command, op, dtype or kernel, or an attribute that the op does not have."""
    with pytest.raises(ConfigError) as error:
        ops.run(argv)
    assert what in str(error.value)
    assert hint is None or hint in (error.value.hint or "")


def test_the_flags_of_explain_are_the_declared_attributes():
    """Each attribute has its flag, with the same words, type and bound; there is one table."""
    flags = {one.name: one for one in options_of(ops.ExplainSection)}
    for name, declared in attribute_options().items():
        assert flags[name] == declared
    own = set(flags) - {one.name for one in options_of(OpAttributes)}
    assert own == {
        "name", "dtype", "device", "plugin_off", "ops", "strict_ops", "deterministic", "json"
    }  # fmt: skip


def test_help_names_the_commands(capsys):
    """Without a command, and with `--help`, they are listed."""
    assert printed(capsys) == printed(capsys, "--help")
    assert "explain" in printed(capsys)


def test_an_extensions_kernels_take_part(extended):
    """It is listed with its plugin; what it needs, and what it may not do, is said."""
    text = extended("list", "attention")
    assert text.index("needy") < text.index("small") < text.index("sdpa")
    assert "needs `nonesuch`, not installed" in text
    listed = json.loads(extended("list", "attention", "--json"))["ops"][0]["kernels"]
    assert {one["id"]: one["requires"] for one in listed}["needy"] == {"nonesuch": False}
    own = {"native", "blocked"}  # as the processor has kernels
    for size, chosen in (("64", {"small"}), ("128", own)):
        found = json.loads(extended("explain", "attention", "--head-dim", size, "--json"))
        assert found["chosen"] in chosen
    assert {"id": "small", "reason": "heads of 64 at most"} in found["rejected"]
    left_open = extended("explain", "attention")
    assert "asks for `head_dim`, which is not given" in left_open
    assert "* native" in left_open or "* blocked" in left_open


def test_an_extensions_unfit_kernel_and_a_tie_are_explained(extended, caplog):
    """A kernel that does not load gives way with a warning; equal priorities say what decided."""
    text = extended("explain", "rms_norm")
    assert re.search(r"^\* (closed-form|ipex) ", text, re.MULTILINE)
    assert "cannot be used: kernel target `nonesuch:rms_norm`" in text
    assert "kernel `gone` of op `rms_norm` (addition) cannot be used" in caplog.text
    text = extended("explain", "layer_norm")
    assert "chosen: of equal priority with another that supports this case, and goes first" in text
    assert "plugin `cpu` brings the device" in " ".join(text.split())


def test_an_extension_can_be_left_out(extended):
    """`--plugin-off` works here as in a run."""
    listed = extended("list", "attention", "--plugin-off", "addition", "--json")
    ids = [one["id"] for one in json.loads(listed)["ops"][0]["kernels"]]
    assert "small" not in ids
    assert "sdpa" in ids
