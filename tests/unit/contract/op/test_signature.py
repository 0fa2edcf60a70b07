"""Kernels whose signature does or does not fit the op's."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from lmcore.contract import OP_SPECS
from lmcore.contract.op.records import load_target
from lmcore.contract.op.signature import readable_signature, signature_problem

ZEROS = np.zeros(2)


def reference(q_BNSD, k_BKSD, *, causal, dropout=0.0, mask=None):
    """Imitate an op with both kinds of arguments."""
    return q_BNSD, k_BKSD, causal, dropout, mask


def same(q_BNSD, k_BKSD, *, causal, dropout=0.0, mask=None): ...
def other_names(query, key, *, causal, dropout=0.0, mask=None): ...
def other_shapes(q_SBND, k_SBKD, causal, dropout=0.0, mask=None): ...
def more_options(q, k, /, *, causal, dropout=0.0, mask=None, block=64): ...
def any_call(*args, **kwargs): ...
def any_names(q, k, **kwargs): ...
def any_places(*tensors, causal, dropout=0.0, mask=None): ...


class Called:
    def __call__(self, q, k, *, causal, dropout=0.0, mask=None): ...


@functools.wraps(same)
def wrapped(*args, **kwargs): ...


@pytest.mark.parametrize(
    "kernel",
    [
        *(same, other_names, other_shapes, more_options, any_call, any_names, any_places, wrapped),
        Called(),
        functools.partial(more_options, block=128),
    ],
)
def test_a_kernel_that_fits_has_no_problem(kernel):
    """Names of tensors, further options and catch-alls are the kernel's own business."""
    assert signature_problem(kernel, reference) is None


def too_few(q, *, causal, dropout=0.0, mask=None): ...
def swapped(k_BKSD, q_BNSD, *, causal, dropout=0.0, mask=None): ...
def name_missing(q, k, *, dropout=0.0, mask=None): ...
def name_by_position(q, k, causal, /, *, dropout=0.0, mask=None): ...
def needs_more(q, k, scale, *, causal, dropout=0.0, mask=None): ...
def needs_named(q, k, *, causal, scale, dropout=0.0, mask=None): ...
def no_default(q, k, *, causal, dropout, mask=None): ...
def other_default(q, k, *, causal, dropout=0.1, mask=None): ...
def taken_twice(q, causal, *, dropout=0.0, mask=None): ...


@pytest.mark.parametrize(
    "kernel, words",
    [
        (
            too_few,
            "it takes 1 argument by position, the op passes 2: `q_BNSD`, `k_BKSD`",
        ),
        (
            swapped,
            (
                "its `k_BKSD` is in the place of the op's `q_BNSD`; "
                "its `q_BNSD` is in the place of the op's `k_BKSD`"
            ),
        ),
        (name_missing, "it does not take `causal` by name, as the op passes it"),
        (
            name_by_position,
            (
                "it does not take `causal` by name, as the op passes it; "
                "it needs `causal`, which the op does not pass"
            ),
        ),
        (needs_more, "it needs `scale`, which the op does not pass"),
        (needs_named, "it needs `scale`, which the op does not pass"),
        (no_default, "it needs `dropout`, which the op may leave out"),
        (other_default, "its default of `dropout` is 0.1, the op's is 0.0"),
        (taken_twice, "it does not take `causal` by name, as the op passes it"),
        (
            functools.partial(same, 1),
            "it takes 1 argument by position, the op passes 2: `q_BNSD`, `k_BKSD`",
        ),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused_with_the_reason(kernel, words):
    """Each way to miss the op's call has its own words."""
    assert signature_problem(kernel, reference) == words


def call(kernel, *, full):
    arguments = {"causal": True} | ({"dropout": 0.0, "mask": None} if full else {})
    kernel(1, 2, **arguments)


@pytest.mark.parametrize(
    "kernel",
    [
        *(too_few, name_missing, name_by_position, needs_more, needs_named, no_default),
        *(taken_twice, functools.partial(same, 1)),
    ],
)
def test_what_is_refused_would_have_raised(kernel):
    """Python itself refuses one of the op's calls, except where order or a default differ."""

    def make_both_calls():
        call(kernel, full=False)
        call(kernel, full=True)

    with pytest.raises(TypeError, match="argument"):
        make_both_calls()


@pytest.mark.parametrize(
    "kernel", [same, other_names, other_shapes, more_options, any_call, any_names, any_places]
)
@pytest.mark.parametrize("full", [False, True])
def test_what_is_accepted_can_be_called(kernel, full):
    """Python accepts the op's shortest and longest call."""
    call(kernel, full=full)


def test_a_default_that_is_no_scalar_differs():
    """A default that is an array is reported, not compared element by element."""

    def kernel(q, k, *, causal, dropout=0.0, mask=ZEROS): ...

    assert "default of `mask`" in signature_problem(kernel, reference)


def test_equal_numbers_of_two_types_are_one_default():
    """0 and 0.0 mean the same."""

    def kernel(q, k, *, causal, dropout=0, mask=None): ...

    assert signature_problem(kernel, reference) is None


def test_a_positional_default_is_compared_too():
    """An argument that may be left out by position has the reference's default."""

    def op(x, scale=1.0): ...
    def fits(x, factor=1.0): ...
    def differs(x, factor=2.0): ...

    assert signature_problem(fits, op) is None
    assert signature_problem(differs, op) == "its default of `factor` is 2.0, the op's is 1.0"


def test_compiled_code_without_a_signature_is_recognised():
    """Nothing can be said of it, and a caller can find that out."""
    assert readable_signature(max) is None
    assert signature_problem(max, reference) is None


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_every_reference_fits_itself(spec):
    """The references pass their own test."""
    function = load_target(spec.reference)
    assert readable_signature(function) is not None
    assert signature_problem(function, function) is None
