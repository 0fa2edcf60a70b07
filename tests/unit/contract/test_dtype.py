"""Names of dtypes, as torch has them and as users write them."""

from __future__ import annotations

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.contract.dtype import dtype_name, parse_dtype


def test_a_dtype_has_torchs_name():
    """The name is the attribute of torch."""
    assert getattr(torch, dtype_name(torch.bfloat16)) is torch.bfloat16


@pytest.mark.parametrize(
    "text, name",
    [
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        ("half", "float16"),
        ("FP32", "float32"),
        (" double ", "float64"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_have_several_names(text, name):
    """Names of torch, of precision policies and of a device's additional dtypes are understood."""
    assert parse_dtype(text, ["float8_e4m3fn"]) == name


def test_an_unknown_dtype_names_the_nearest():
    """A typo is answered with what was meant."""
    with pytest.raises(ConfigError, match="`--dtype blfoat16`") as error:
        parse_dtype("blfoat16")
    assert "did you mean `bfloat16`" in error.value.hint
    assert "`bf16`" in error.value.hint
