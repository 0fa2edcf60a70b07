"""`lmcore_cpu._kernels`: the C++ of `native/cpu`, for generation and for the optimizer.

It is part of wheels, and is built at installation if there is a C++ compiler.  Without it, or on a
processor without its instructions, torch's libraries are used; `lmcore doctor` says so.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ACTIVATION_COLUMNS",
    "SEQUENCE_CHANNELS",
    "ConstantProjection",
    "Kernels",
    "module",
    "reason",
]

ACTIVATION_COLUMNS = 16
"""Divisor of the columns in `activate`."""

SEQUENCE_CHANNELS = 32
"""Divisor of the channels of a head in `attend_sequences`."""

_INTERFACE = 7
"""Version of the signatures, also in `native/cpu/module.cpp`; raise both with every change."""


class ConstantProjection(Protocol):
    """Projection by a packed weight; arrays are contiguous."""

    def project(self, *arguments: Any) -> None:
        """Compute outputs [rows, outputs] from inputs [rows, inputs].

        Args:
            arguments: Address of the inputs and whether they are float32, not bfloat16; the same of
                the outputs; rows; threads.
        """


class Kernels(Protocol):
    """Functions of `lmcore_cpu._kernels`; they read arrays in place and release the GIL."""

    def blocks(self) -> Mapping[str, tuple[int, int]]:
        """Return how weights are packed for each instruction set, the fastest first.

        The outputs of a block, and the divisor of the inputs of bfloat16 weights, which are packed
        in pairs; 0 if they are not.
        """

    def has_threads(self) -> bool:
        """Return True if torch's threads were found."""

    def ConstantProjection(  # noqa: N802 - a class there
        self,
        instructions: str,
        weight: int,
        weight_type: int,
        inputs: int,
        outputs: int,
        scale: int,
        bias: int,
        gelu: bool,  # noqa: FBT001 - the signature is C++'s
        /,
    ) -> ConstantProjection:
        """Make a projection; see `lmcore_cpu.kernel.few_rows`."""

    def attend_next_token(self, *arguments: Any) -> None:
        """Attend to slots of a cache: `NextToken` in `native/cpu/kernels.hpp`.

        Args:
            arguments: Instruction set; whether the arrays are bfloat16; address and first two
                strides of q, of k and of v; addresses of the slots of keys and of values, and their
                first two strides; addresses of the lengths and of the output; sequences, heads,
                heads of keys, channels, the longest length, the factor of scores, threads.
        """

    def attend_sequences(
        self,
        instructions: str,
        arrays: Sequence[tuple[int, tuple[int, ...], bool]],
        logs: int,
        sizes: tuple[int, ...],
        causal: bool,  # noqa: FBT001 - the signature is C++'s
        scale: float,
        threads: int,
        /,
    ) -> None:
        """Attend to whole sequences, or compute gradients: see `SequenceAttention` in C++.

        Args:
            instructions: Instruction set, not `avx2`; for bfloat16 not `avx512`.
            arrays: Address, first three strides, and whether it is float32, of q, k, v and the
                output; for gradients also of the gradients of the output, of q, k and v.
            logs: Address of the logarithms of sums, float32.
            sizes: Sequences, heads, heads of keys, queries, keys, channels.
            causal: True to hide keys after their query.
            scale: Factor of scores.
            threads: Number of threads.
        """

    def activate(
        self,
        instructions: str,
        is_bfloat16: bool,  # noqa: FBT001 - the signature is C++'s
        arrays: Sequence[int],
        rows: int,
        columns: int,
        threads: int,
        /,
    ) -> None:
        """Compute GELU of x + bias, SwiGLU, or gradients: see `Activation` in C++.

        Args:
            instructions: Instruction set.
            is_bfloat16: True if x, y and their gradients are bfloat16, False if they are float32.
            arrays: Addresses of x, the bias, which is float32, or 0 for SwiGLU, and y; for
                gradients of x, the bias, and the gradients of y, x and the bias.
            rows: Number of rows.
            columns: Columns of y.
            threads: Number of threads.
        """

    def adamw(
        self,
        instructions: str,
        tensors: Sequence[tuple[int, ...]],
        steps: Sequence[tuple[float, ...]],
        threads: int,
        /,
    ) -> None:
        """Update weights and moments, float32 and contiguous; see `lmcore_cpu.kernel.adamw`.

        Args:
            instructions: Instruction set.
            tensors: For each weight: addresses of weight, first and second moment, gradient, new
                weight, new first and second moment, the new weight in bfloat16 or 0; and number of
                elements.
            steps: For each weight: factors of the step, `AdamwStep` in `native/cpu/kernels.hpp`.
            threads: Number of threads.
        """


def _load() -> tuple[Kernels | None, str]:
    try:
        module = importlib.import_module("lmcore_cpu._kernels")
    except ModuleNotFoundError:
        return None, "lmcore was installed without a C++ compiler"
    except ImportError as error:
        return None, f"`lmcore_cpu._kernels` does not load ({error})"
    if getattr(module, "INTERFACE", None) != _INTERFACE:
        return None, f"`{module.__file__}` is of another version of lmcore"
    found = cast("Kernels", module)
    if not found.blocks():
        return None, "this processor has neither AVX-512 nor AVX2"
    if not found.has_threads():
        return None, "this torch has no OpenMP threads that it could use"
    return found, f"`{module.__file__}`"


@cache
def _loaded() -> tuple[Kernels | None, str]:
    import torch  # noqa: F401 - brings the threads that are looked for

    return _load()


def module() -> Kernels | None:
    """Return the module; None if it cannot be used here."""
    return _loaded()[0]


def reason() -> str:
    """Return why the module cannot be used here, or its file."""
    return _loaded()[1]
