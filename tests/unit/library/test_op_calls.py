"""Ops as plain functions: the bound kernel, bound once, with clear errors."""

from __future__ import annotations

import inspect

import pytest
import torch

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.contract import OP_SPECS
from lmcore.contract.op import reference
from lmcore.library.op_calls import OpCalls

X = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))
W = torch.linspace(0.5, 1.5, 8)
IDS = torch.arange(6)

CALLS = {
    "attention": ((X, X[:, :2], X[:, :2]), {"causal": True}),
    "layer_norm": ((X, W, W, 1e-5), {}),
    "rms_norm": ((X, W, 1e-5), {}),
    "linear": ((X, X[0, 0], None), {}),
    "bias_gelu": ((X, W), {}),
    "swiglu": ((X,), {}),
    "bias_dropout_add": ((X, None, X), {"dropout": 0.0, "training": True}),
    "scaled_masked_softmax": ((X, X > 1, 0.5), {}),
    "rotary_embedding": ((X, X[0, 0, :, :3], X[0, 1, :, :3]), {}),
    "cross_entropy": ((X[0, 0], IDS), {}),
    "linear_cross_entropy": ((X[0, 0], X[0, 1], IDS % 6, W[:6]), {}),
    "grad_norm": (([X, W],), {}),
}


def adamw_arguments():
    """Return arguments of `adamw`, which it changes."""
    tensors = [[W.clone()] for _ in range(4)]
    decay = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    return (*tensors, [torch.zeros(())]), {"lr": 0.1, **decay}


def test_every_op_is_called_as_its_reference(counted_runtime):
    """Each op of the table is a function with the reference's signature and result."""
    ops = OpCalls(counted_runtime())
    assert {*CALLS, "adamw"} == {spec.name for spec in OP_SPECS} <= set(dir(ops))
    for op, (args, options) in CALLS.items():
        call, of = getattr(ops, op), getattr(reference, op)
        assert inspect.signature(call) == inspect.signature(of)
        assert torch.equal(call(*args, **options), of(*args, **options)), op
    (args, options), (theirs, _) = adamw_arguments(), adamw_arguments()
    ops.adamw(*args, **options)
    reference.adamw(*theirs, **options)
    assert torch.equal(args[0][0], theirs[0][0])


def test_the_devices_kernel_is_called(counted_runtime):
    """A call runs the kernel of the plugin, also with parameters by name."""
    runtime = counted_runtime("rms_norm")
    ops = OpCalls(runtime)
    first = ops.rms_norm(X, W, 1e-5)
    assert torch.equal(first, ops.rms_norm(epsilon=1e-5, weight_H=W, x_BSH=X))
    assert runtime.calls["rms_norm"] == 2


def test_a_case_is_bound_once(counted_runtime):
    """Other batches and lengths up to the next power of 2 take the kernel that is bound."""
    runtime = counted_runtime("attention", "linear")
    ops = OpCalls(runtime)
    for batch, length in ((2, 5), (3, 6), (2, 6), (1, 8)):
        x = X.new_ones(batch, 4, length, 8)
        ops.attention(x, x, x, causal=True)
        ops.linear(x, torch.ones(3, 8), None)
    bound = {one.op: dict(one.context.attributes) for one in runtime.ops.resolutions}
    assert len(runtime.ops.resolutions) == len(runtime.cases) == 2
    assert bound["attention"] == {
        "head_dim": 8, "num_attention_heads": 4, "num_query_groups": 4, "seq_length": 8,
        "causal": True, "masked": False, "dropout": 0.0, "compile": False,
    }  # fmt: skip
    linear = {"in_features": 8, "out_features": 3, "bias": False, "compile": False}
    assert bound["linear"] == linear


def test_a_bias_of_the_scores_is_a_case(counted_runtime):
    """A floating-point mask of attention is added, and its gradient asks for another kernel."""
    runtime = counted_runtime("attention")
    ops = OpCalls(runtime)
    bias = torch.ones(6, 6).tril().log()
    found = [ops.attention(X, X, X, causal=False, mask=mask) for mask in (bias < 0, bias, bias)]
    expected = reference.attention(X, X, X, causal=True)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)
    trained = torch.zeros(6, 6, requires_grad=True)
    ops.attention(X, X, X, causal=False, mask=trained).sum().backward()
    with torch.no_grad():
        ops.attention(X, X, X, causal=False, mask=trained)
    assert trained.grad is not None
    names = ("masked", "score_bias", "score_bias_gradient")
    cases = [
        tuple(one.context.attributes.get(name) for name in names) for one in runtime.ops.resolutions
    ]
    assert cases == [(True, None, None), (True, True, None), (True, True, True)]


def test_the_shapes_that_are_kept_are_bounded(counted_runtime, monkeypatch):
    """A loop over ever new shapes keeps a limited number, and stays right."""
    monkeypatch.setattr("lmcore.library.op_calls._MOST_SHAPES", 2)
    runtime = counted_runtime("rms_norm")
    ops = OpCalls(runtime)
    for length in (1, 2, 3, 4, 1):
        x = X[0, 0, :length]
        assert torch.equal(
            ops.rms_norm(x, W, 1e-5), ops.bind("rms_norm", hidden_size=8)(x, W, 1e-5)
        )
        assert len(inspect.getclosurevars(ops.rms_norm).nonlocals["kernels"]) <= 2
    assert len(runtime.ops.resolutions) == 1


def test_the_dtype_of_a_case(counted_runtime):
    """It is the tensor's dtype; for a product under autocast it is autocast's dtype."""
    runtime = counted_runtime("linear", "rms_norm")
    ops = OpCalls(runtime)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(X, torch.ones(3, 8), None).dtype == torch.bfloat16
        ops.rms_norm(X, W, 1e-5)
    ops.linear(X, torch.ones(3, 8), None)
    ops.rms_norm(X.bfloat16(), W, 1e-5)
    dtypes = [(one.op, one.context.dtype) for one in runtime.ops.resolutions]
    assert dtypes == [
        ("linear", "bfloat16"), ("rms_norm", "float32"),
        ("linear", "float32"), ("rms_norm", "bfloat16"),
    ]  # fmt: skip


def test_bind_gives_the_kernel_itself(counted_runtime):
    """For a caller that binds; attributes of the op only."""
    runtime = counted_runtime("rms_norm")
    ops = OpCalls(runtime)
    kernel = ops.bind("rms_norm", hidden_size=8, compile=True)
    kernel(X, W, 1e-5)
    assert runtime.calls["rms_norm"] == 1
    assert runtime.cases[0].attributes == {"hidden_size": 8, "compile": True}
    assert runtime.cases[0].dtype == "float32"
    with pytest.raises(ConfigError, match="no attribute `hidden_sizes`") as error:
        ops.bind("rms_norm", hidden_sizes=8)
    assert "did you mean `hidden_size`" in str(error.value)
    for wrong in ("8", "x", 0):
        with pytest.raises(ConfigError, match="expected an integer >= 1"):
            ops.bind("rms_norm", hidden_size=wrong)


def test_unknown_ops_are_refused_with_a_suggestion(counted_runtime):
    """Attributes and names of unknown ops are refused, with a suggestion."""
    ops = OpCalls(counted_runtime())
    with pytest.raises(AttributeError, match="no op `rmsnorm`; did you mean `rms_norm`"):
        ops.rmsnorm  # noqa: B018
    with pytest.raises(ConfigError, match="did you mean `attention`"):
        ops.explain("atention")
    with pytest.raises(ConfigError, match=r"did you mean `rms_norm`\?$"):
        ops.explain("rms")
    assert not hasattr(ops, "rmsnorm")


def test_explain_says_which_kernel_and_why(counted_runtime):
    """The text has the case, the chosen kernel and the reasons; nothing is bound for it."""
    runtime = counted_runtime("attention", preferences={"attention": ("reference",)})
    ops = OpCalls(runtime)
    text = ops.explain("attention", X, X, X, causal=False)
    assert "attention on cpu, float32" in text
    assert "head_dim 8, num_attention_heads 4" in text
    assert "causal no" in text
    assert "* reference  lmcore" in text
    assert "`reference` is preferred by --ops" in text
    assert "not specified: --head-dim" in ops.explain("attention", num_attention_heads=4)
    assert not runtime.ops.resolutions


@pytest.mark.parametrize(
    "op, args, options, message",
    [
        ("rms_norm", (X, W[:7], 1e-5), {}, "`H` of `x_BSH` and of `weight_H` differ"),
        ("rms_norm", ([1.0], W, 1e-5), {}, "`x_BSH` is of type `list`, not a tensor"),
        ("rms_norm", (X, None, 1e-5), {}, "`weight_H` is of type `NoneType`"),
        ("rms_norm", (X, W.to("meta"), 1e-5), {}, "not on the device of the session, cpu"),
        ("rms_norm", (X.long(), W, 1e-5), {}, "`x_BSH` is int64, and a floating-point dtype"),
        ("linear", (X, torch.ones(8, 3), None), {}, "`I` of `x_BSI` and of `weight_OI` differ"),
        ("bias_dropout_add", (X, W, X[:1]), {"dropout": 0.0, "training": True}, "leading dims"),
        ("swiglu", (X[..., :7],), {}, "7 channels, an odd number"),
        ("attention", (X, X[:, :3], X[:, :3]), {"causal": True}, "3 heads of keys do not divide 4"),
        ("attention", (X[0], X, X), {"causal": True}, "`q_BNSD` has 3 dims, and 4 are needed"),
        (
            "attention",
            (X, X, X),
            {"causal": True, "mask": X.long()},
            "int64, and bool or a floating-point",
        ),
        ("rotary_embedding", (X, X[0, 0], X[0, 0]), {}, "8 angles rotate 16 channels"),
        ("cross_entropy", (X[0, 0], IDS.int()), {}, "`target_T` is int32, and int64 is needed"),
        ("grad_norm", ([],), {}, "got no tensor"),
    ],
)
def test_wrong_arguments_are_refused(counted_runtime, op, args, options, message):
    """Before the kernel sees them, by name, with the shapes."""
    runtime = counted_runtime(op)
    with pytest.raises(LmcoreError) as error:
        getattr(OpCalls(runtime), op)(*args, **options)
    assert message in str(error.value)
    assert not runtime.calls


def test_arguments_of_the_wrong_number_are_pythons_error(counted_runtime):
    """A wrong number of arguments is a TypeError, as with any function."""
    with pytest.raises(TypeError, match="epsilon"):
        OpCalls(counted_runtime()).rms_norm(X, W)
