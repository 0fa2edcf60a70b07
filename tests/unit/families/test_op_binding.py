"""Binding: a model gives the cases of its ops with all that kernels may ask."""

from __future__ import annotations

import pytest

from lmcore.contract import OP_SPECS, OpImpl, OpTable
from lmcore.contract.op.context import attribute_options
from lmcore.contract.op.records import load_target
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    ffn_hidden_size=24,
    max_position_embeddings=16,
    padded_vocab_size=32,
    hidden_dropout=0.25,
)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_models_ops_are_bound_with_every_attribute(compiled):
    """Each case has exactly what its op's spec declares, of the declared types."""
    table = OpTable(OP_SPECS)
    GPT(SHAPE, OpBinding(table, "cpu", "bfloat16", compile=compiled))
    options = attribute_options()
    for one in table.resolutions:
        attributes = one.context.attributes
        # A case names a bias of the scores only if it has one: test_alibi.py.
        declared = set(table.specs[one.op].attributes) - {"score_bias", "score_bias_gradient"}
        assert set(attributes) == declared, one.op
        for name, value in attributes.items():
            assert type(value) is options[name].type, (one.op, name)
        assert attributes["compile"] is compiled
        assert (one.context.device_type, one.context.dtype) == ("cpu", "bfloat16")


def test_the_attributes_are_the_models():
    """A kernel's attributes are the sizes of the shape."""
    table = OpTable(OP_SPECS)
    GPT(SHAPE, OpBinding(table, "cpu", "float32"))
    seen = {one.op: one.context.attributes for one in table.resolutions if one.op != "linear"}
    assert seen["attention"] == {
        "head_dim": 4, "num_attention_heads": 2, "num_query_groups": 2, "seq_length": 16,
        "causal": True, "masked": False, "dropout": 0.0, "compile": False,
    }  # fmt: skip
    assert seen["bias_gelu"]["ffn_hidden_size"] == 24
    assert seen["bias_dropout_add"]["dropout"] == 0.25
    assert seen["linear_cross_entropy"]["vocab_size"] == 32
    linear = [one.context.attributes for one in table.resolutions if one.op == "linear"]
    sizes = {(one["in_features"], one["out_features"], one["bias"]) for one in linear}
    assert sizes == {(8, 24, True), (8, 8, False), (8, 24, False), (24, 8, False)}


def test_a_module_keeps_the_bare_kernel():
    """A step calls the kernel's own function, an attribute of the module, without a wrapper.

    `benchmarks/abstraction.py` measures what the attribute costs.
    """
    kernel = "lmcore.contract.op.reference"
    table = OpTable(OP_SPECS, [OpImpl("layer_norm", "own", f"{kernel}:layer_norm", plugin="chip")])
    norm = GPT(SHAPE, OpBinding(table, "cpu", "float32")).blocks["0"].attention_norm
    assert vars(norm)["op"] is load_target(f"{kernel}:layer_norm")
    assert table.resolutions[0].chosen == "own"


@pytest.mark.parametrize("attributes", [{}, {"hidden_size": 8, "moon": 1}, {"hidden_sise": 8}])
def test_a_bind_that_leaves_out_or_adds_an_attribute_fails(attributes):
    """The model and the declared table cannot drift apart."""
    with pytest.raises(AssertionError, match="`layer_norm` is bound with"):
        OpBinding(OpTable(OP_SPECS), "cpu", "float32").bind("layer_norm", **attributes)
