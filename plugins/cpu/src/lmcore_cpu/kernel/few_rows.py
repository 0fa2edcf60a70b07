"""Products with a constant weight in float32, bfloat16 or 8 bits, in float32 sums, for few rows.

With few rows most of the time goes into reading the weight: its size and its order in memory
decide.  The C++ of `native/cpu/projection.hpp` reads a packed copy from front to back: blocks of a
few vectors of outputs, each with all inputs, so that a block's sums stay in registers.  It expands
the weight to float32 in registers, which needs no instructions for bfloat16, and prefetches, with
which a core uses more of the memory's bandwidth.  A bfloat16 weight goes to the processor's matrix
units if it has them (`matrix_units.hpp`), with activations in bfloat16, for any number of rows.

Shapes: M rows (all leading dims), I inputs, O outputs, P blocks, B outputs of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lmcore_cpu.kernel import native
from lmcore_cpu.kernel.processor import facts
from lmcore_cpu.kernel.weight_memory import new_weight

__all__ = ["PackedWeight"]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ACTIVATIONS = frozenset({torch.float32, torch.bfloat16})
_MOST_ROWS = 256
"""Rows beyond which torch's product by an expanded weight is faster, without GELU."""


class PackedWeight:
    """Weight [O, I] in blocks of outputs, each with all inputs: [P, I, B].

    For matrix units the inputs are in pairs, and padded with zeros: [P, I / 2, B, 2].

    Attributes:
        outputs, inputs: Size of the weight.
        blocks: Packed values; the last block is padded with zeros.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        scale_O: Tensor | None = None,
        *,
        gelu: bool = False,
        output: torch.dtype | None = None,
        instructions: str | None = None,
    ) -> None:
        """Pack a weight, which is not needed afterwards; `Facts.kernels` must be there.

        Args:
            weight_OI: Weight in float32, bfloat16 or int8, at least one element.
            bias_O: Bias; None for none.
            scale_O: Factor of each output; None for none.
            gelu: True to apply the tanh form of GELU.
            output: float32 or bfloat16, the dtype of the outputs; None: the dtype of the inputs.
            instructions: Instruction set, one of `Facts.instructions`; None: the fastest.
        """
        kernels = facts().kernels
        assert kernels is not None, native.reason()
        chosen = instructions or facts().instructions[0]
        block, pairs = kernels.blocks()[chosen]
        self._paired = pairs > 0 and weight_OI.dtype == torch.bfloat16
        self.outputs, self.inputs = weight_OI.shape
        more = -self.inputs % pairs if self._paired else 0
        padded = functional.pad(weight_OI.detach(), (0, more, 0, -self.outputs % block))
        blocks = padded.unflatten(0, (-1, block)).transpose(1, 2)
        if self._paired:
            blocks = blocks.unflatten(1, (-1, 2)).transpose(2, 3)
        self.blocks = new_weight(tuple(blocks.shape), weight_OI.dtype).copy_(blocks)
        self._scale_O, self._bias_O = (
            None if one is None else one.detach().float().contiguous() for one in (scale_O, bias_O)
        )
        self._gelu, self._output = gelu, output
        self._projection = kernels.ConstantProjection(
            chosen,
            self.blocks.data_ptr(),
            _TYPES[weight_OI.dtype],
            self.inputs,
            self.outputs,
            _address(self._scale_O),
            _address(self._bias_O),
            gelu,
        )

    def project(self, x: Tensor) -> Tensor:
        """Return gelu((x @ weight.T) * scale + bias), rounded once to the output's dtype.

        Matrix units round float32 activations to bfloat16.

        Args:
            x: float32 or bfloat16, [..., I].

        Raises:
            ValueError: x has another dtype or another number of inputs.
        """
        if x.dtype not in _ACTIVATIONS or x.shape[-1] != self.inputs:
            raise ValueError(f"a weight with {self.inputs} inputs, x is {x.dtype} {(*x.shape,)}")
        rows = x.numel() // self.inputs
        output = x.dtype if self._output is None else self._output
        narrow = self.blocks.dtype != torch.float32 and not self._paired
        if rows > _MOST_ROWS and narrow and not self._gelu:
            return self._project_many(x).to(output)
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.outputs), dtype=output)
        wide_x, wide_y = x.dtype == torch.float32, output == torch.float32
        threads = torch.get_num_threads()
        self._projection.project(x.data_ptr(), wide_x, y.data_ptr(), wide_y, rows, threads)
        return y

    def _project_many(self, x: Tensor) -> Tensor:
        """Return the same in float32, by torch's product with the weight expanded to float32."""
        wide: Tensor = x.float() @ self.transposed(torch.float32)
        if self._scale_O is not None:
            wide.mul_(self._scale_O)
        return wide if self._bias_O is None else wide.add_(self._bias_O)

    def transposed(self, dtype: torch.dtype) -> Tensor:
        """Return the weight without scale in another dtype, [I, O], in new memory; not in pairs."""
        blocks, inputs, block = self.blocks.shape
        weight_IPB = self.blocks.new_empty((inputs, blocks, block), dtype=dtype)
        weight_IPB.copy_(self.blocks.transpose(0, 1))
        weight_IO: Tensor = weight_IPB.view(inputs, -1)
        return weight_IO[:, : self.outputs]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
