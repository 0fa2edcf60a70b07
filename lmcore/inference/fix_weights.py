"""Weights that do not change any more: cast or quantized once, in the layout of the device.

Only weights are quantized, to small integers; activations are not: a row of a product does not
depend on other rows.

Shapes: O outputs, I inputs, G groups of inputs that share a scale, N inputs of a group, M rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.base.errors import ConfigError, counted
from lmcore.contract.generation_kernels import ConstantProjection, QuantizedWeight
from lmcore.families.layers.cross_attention import CrossAttention
from lmcore.families.layers.projection import Embedding, Linear
from lmcore.families.layers.transformer import Attention, FeedForward
from lmcore.families.protocol import SourceLM
from lmcore.inference.text_model import Execution

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.contract.generation_kernels import Projection
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.families.protocol import CausalLM, Model
    from lmcore.runtime.runtime import Runtime

__all__ = ["device_attention", "fix_layers", "fix_weights"]

logger = logging.getLogger(__name__)

_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {"int8": 8, "int4": 4}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": functional.gelu,
    "relu": functional.relu,
}
"""Activations of feed-forward layers, after the bias; others are GELU by tanh."""
_HEAD = "head"
_HEAD_BITS = 8
"""Fewest bits of the head: it decides between tokens, and 4 bits cost the most there."""


def fix_weights(
    model: CausalLM,
    runtime: Runtime,
    rows: int,
    quantization: str | None = None,
    *,
    divided: bool = False,
) -> Execution:
    """Prepare a loaded model for generation and return how its forward passes run.

    A policy that would cast the weights of products in every pass is replaced by weights that are
    cast here: the products are the same.  The model cannot be trained afterwards, and its
    projections have no `weight` if the device has a copy in another layout.  Where
    the device's projection includes them, biases and GELU are computed with it, and attention of
    new tokens is the device's own if it has one.

    Args:
        model: Model, or a part of one, on the run's device and in evaluation mode.
        runtime: Device and precision.
        rows: Usual number of rows of a product: the sequences that are decoded together.
        quantization: `int8` or `int4`: the projections and the head are rounded to integers of so
            many bits, the head to at least 8; embeddings and norms stay.  None: nothing is.
        divided: True if each projection's inputs or outputs are divided over several processes.

    Raises:
        ConfigError: The precision policy does not go with quantization.
    """
    policy = runtime.precision
    if isinstance(model, SourceLM) and quantization is not None:
        raise ConfigError(
            f"`--quantization {quantization}` is not supported by {model.family.name} models",
            hint="use `--precision bf16`",
        )
    dtype = _narrow_dtype(policy)
    if quantization is not None and dtype is None and policy.compute != policy.keep:
        raise ConfigError(
            f"`--quantization {quantization}` cannot be used with `--precision {policy.name}`",
            why="the precision replaces the products by its own",
            hint="use `--precision bf16`",
        )
    fixed = _Fixed(runtime.device, dtype, rows, quantization)
    _fix_layers(model, fixed, divided=divided)
    head = model.head_weight if model.part.head else None
    for module in model.modules():
        if isinstance(module, Embedding) and module.of_tokens and module.weight is not head:
            _cast_table(module, dtype)
    if model.part.head:
        _fix_head(model, fixed)
    fixed.report(policy.name, runtime.rank.world_size)
    _shorten_lookups(model)
    return Execution.on(runtime.device, policy.context if dtype is None else nullcontext)


def fix_layers(model: Model, runtime: Runtime, rows: int) -> None:
    """Put the weights of the layers of a loaded encoder in the layout of the device.

    A precision that casts the factors of products keeps its own.  The model cannot be trained
    afterwards, and its projections have no `weight` if the device has a copy in another layout.

    Args:
        model: Model on the run's device and in evaluation mode.
        runtime: Device and precision.
        rows: Usual number of rows of a product: the tokens of a pass.
    """
    if _narrow_dtype(runtime.precision) is None:
        _fix_layers(model, _Fixed(runtime.device, None, rows, None), divided=False)


def _fix_layers(model: Model, fixed: _Fixed, *, divided: bool) -> None:
    for name, module in model.named_modules():
        if isinstance(module, CrossAttention):
            _fix_cross_attention(module, fixed, name, divided=divided)
        elif isinstance(module, Attention):
            _fix_attention(module, fixed, name, divided=divided)
        elif isinstance(module, FeedForward):
            _fix_feed_forward(module, fixed, name, divided=divided)


@contextmanager
def device_attention(model: CausalLM, runtime: Runtime) -> Iterator[None]:
    """Let a model of a run attend to its cache by the device's own kernel, within the context.

    Nothing else is prepared as in `fix_weights`: the model can be trained afterwards.
    """
    make, policy = runtime.device.next_token_attention, runtime.precision
    attentions = [one for one in model.modules() if isinstance(one, Attention)]
    layers = [one for one in attentions if one.standard and not isinstance(one, CrossAttention)]
    if make is not None:
        for layer in layers:
            dtype = _narrow_dtype(policy) or layer.qkv.weight.dtype
            layer.next_token = make(dtype, layer.head_dim)
    try:
        yield
    finally:
        for layer in layers:
            layer.next_token = None


def _shorten_lookups(model: CausalLM) -> None:
    """Make the parts of modules plain attributes, beside `nn.Module`'s own tables.

    `nn.Module.__getattr__` is called for attributes that are not found otherwise, some 300 times
    for a token: about 0.25 ms with 12 layers.  Parts cannot be replaced afterwards.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)  # noqa: SLF001
        module.__dict__.update(module._parameters)  # noqa: SLF001


def _narrow_dtype(policy: PrecisionPolicy) -> torch.dtype | None:
    """Return the dtype of a policy that casts the factors of products; None for another policy."""
    casts = policy.prepare is None and not policy.output and policy.keep == "float32"
    return _NARROW.get(policy.compute) if casts else None


@dataclass(frozen=True)
class _Made:
    """Projection by a constant weight, and the activation that it includes; None: none."""

    project: Projection
    activation: str | None = None


@dataclass
class _Fixed:
    """Projections by constant weights, and an account of them.

    Attributes:
        device: Device of the model.
        dtype: Dtype that the factors of products are cast to; None: they are not cast.
        rows: Usual number of rows.
        quantization: Kind of integers; None: weights are not quantized.
        quantized: Bits and bytes of each quantized weight, by its name.
        expanded: Number of quantized weights that the device has no products for.
        kept: Names of weights that are not quantized.
    """

    device: Device
    dtype: torch.dtype | None
    rows: int
    quantization: str | None
    quantized: dict[str, tuple[int, int]] = field(default_factory=dict)
    expanded: int = 0
    kept: list[str] = field(default_factory=list)

    @torch.no_grad()
    def projection(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        *,
        output: torch.dtype | None = None,
        activation: str | None = None,
    ) -> _Made | None:
        """Return the projection by a weight; None if torch's own is as good.

        Args:
            name: Name of the weight.
            weight: Weight [O, I]; may be freed afterwards.
            bias: Bias [O] or None.
            output: Dtype of the outputs; None: the dtype of the products.
            activation: Activation of the outputs, which the projection may include.
        """
        compute = weight.dtype if self.dtype is None else self.dtype
        output = compute if output is None else output
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
        if self.quantization is None:
            return self._offered(weight.to(compute), bias, output, activation)
        bits = _BITS[self.quantization]
        bits = max(bits, _HEAD_BITS) if name == _HEAD else bits
        quantized = quantize(weight, bits, compute)
        if quantized is None:
            self.kept.append(name)
            return self._offered(weight.to(compute), bias, output, activation)
        self.quantized[name] = bits, quantized.num_bytes
        made = self._offered(quantized, bias, output, activation)
        if made is None:
            self.expanded += 1
            expanded = expanded_projection(quantized, None if bias is None else bias.to(compute))
            made = _Made(lambda x: expanded(x.to(compute)).to(output))
        return made

    def _offered(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        output: torch.dtype,
        activation: str | None,
    ) -> _Made | None:
        """Return the device's projection, with the activation if it includes it."""
        make = self.device.constant_projection
        if make is None:
            return None
        for included in dict.fromkeys((activation, None)):
            project = make(ConstantProjection(weight, bias, output, self.rows, included))
            if project is not None:
                return _Made(project, included)
        return None

    def report(self, precision: str, processes: int) -> None:
        """Log what was quantized, and what was not.

        Args:
            precision: Name of the policy in which the products are computed.
            processes: Number of processes that the model is divided over.
        """
        if self.quantization is None:
            return
        words = []
        for bits in sorted({bits for bits, _ in self.quantized.values()}):
            names = [name for name, (width, _) in self.quantized.items() if width == bits]
            what = "the head" if names == [_HEAD] else counted(len(names), "matrix", "matrices")
            words.append(f"{what} to int{bits}")
        size = sum(size for _, size in self.quantized.values()) / 1e6
        where = f" in this process, one of {processes}" if processes > 1 else ""
        logger.info(
            "quantized %s: %.1f MB%s; products are computed in %s",
            *(" and ".join(words) or "nothing", size, where, precision),
        )
        if self.kept:
            logger.warning(
                "not quantized, because the number of inputs is no multiple of %d: %s, %s",
                *(GROUP, counted(len(self.kept), "matrix", "matrices"), ", ".join(self.kept[:4])),
            )
        if self.expanded:
            logger.warning(
                "device `%s` has no kernel for %d of the %d quantized weights in this dtype and "
                "size: they are expanded for each product, which saves memory but takes longer",
                *(self.device.type, self.expanded, len(self.quantized)),
            )


def _fix_attention(module: Attention, fixed: _Fixed, name: str, *, divided: bool) -> None:
    _fix_linear(module.qkv, fixed, f"{name}.qkv", module.qkv.bias)
    _fix_output(module, fixed, name, divided=divided)
    make = fixed.device.next_token_attention
    if make is not None and module.standard:
        dtype = module.qkv.weight.dtype if fixed.dtype is None else fixed.dtype
        module.next_token = make(dtype, module.head_dim)


def _fix_cross_attention(
    module: CrossAttention, fixed: _Fixed, name: str, *, divided: bool
) -> None:
    _fix_linear(module.query, fixed, f"{name}.query", module.query.bias)
    _fix_linear(module.key_value, fixed, f"{name}.key_value", module.key_value.bias)
    _fix_output(module, fixed, name, divided=divided)


def _fix_output(module: Attention, fixed: _Fixed, name: str, *, divided: bool) -> None:
    if divided:  # the bias is added to the sum over the processes
        _fix_linear(module.output, fixed, f"{name}.output")
    elif _fix_branch(module.output, fixed, f"{name}.output", module.output_bias):
        module.output_bias = None


def _fix_feed_forward(module: FeedForward, fixed: _Fixed, name: str, *, divided: bool) -> None:
    if module.gated:
        _fix_linear(module.up, fixed, f"{name}.up", module.up.bias)
    else:
        up, bias = module.up.weight, module.up_bias
        activate = _ACTIVATIONS.get(module.activation)
        included = "gelu_tanh" if activate is None else None
        made = fixed.projection(f"{name}.up", up, bias, activation=included)
        if made is not None and made.activation is not None:
            module.op = lambda x, _bias: x
        elif made is not None:
            after = activate or functools.partial(functional.gelu, approximate="tanh")
            module.op = lambda x, _bias: after(x)
        _replace(module.up, fixed, made)
    if divided:
        _fix_linear(module.down, fixed, f"{name}.down")
    elif _fix_branch(module.down, fixed, f"{name}.down", module.down_bias):
        module.down_bias = None


def _fix_linear(module: Linear, fixed: _Fixed, name: str, bias: Tensor | None = None) -> None:
    _replace(module, fixed, fixed.projection(name, module.weight, bias))


def _fix_branch(module: Linear, fixed: _Fixed, name: str, bias: Tensor | None) -> bool:
    """Fix a projection that ends a residual branch; return True if it adds the bias.

    Its outputs have the dtype of the residual stream, which is not rounded with the products.
    """
    made = fixed.projection(name, module.weight, bias, output=module.weight.dtype)
    _replace(module, fixed, made)
    return made is not None


def _replace(module: Linear, fixed: _Fixed, made: _Made | None) -> None:
    if made is None:
        module.op = _cast_first(module.op, fixed.dtype)
    else:
        project = made.project
        module.op = lambda x, _weight, _bias: project(x)
        _free(module.weight)
    if fixed.dtype is not None:
        module.to(fixed.dtype)


def _fix_head(model: CausalLM, fixed: _Fixed) -> None:
    """Fix the product with the head's weight, which may be the table of the token embedding."""
    made = fixed.projection(_HEAD, model.head_weight, None)
    owners = [
        module
        for module in model.modules()
        if isinstance(module, Embedding) and module.weight is model.head_weight
    ]
    for module in owners:
        _cast_table(module, fixed.dtype)
    if made is not None:
        model.head_projection = made.project
        if not model.tied_parameters:
            _free(model.head_weight)
        return
    linear = _cast_first(_linear, fixed.dtype)
    model.head_projection = lambda hidden: linear(hidden, model.head_weight, None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _cast_table(module: Embedding, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        module.output_dtype = module.weight.dtype
        module.to(dtype)


def _free(weight: Tensor) -> None:
    """Free the memory of a weight, which keeps its device and dtype."""
    weight.data = weight.new_empty((0, *weight.shape[1:]))


def _cast_first(op: Callable[..., Tensor], dtype: torch.dtype | None) -> Callable[..., Tensor]:
    """Return an op that casts its first argument."""
    if dtype is None:
        return op
    return lambda x, weight, bias: op(x.to(dtype), weight, bias)


GROUP = 32
"""Inputs that share a scale with 4 bits."""


def quantize(weight_OI: Tensor, bits: int, dtype: torch.dtype) -> QuantizedWeight | None:
    """Return a weight rounded to the nearest integers; None if it cannot be split into groups.

    With 8 bits each output has a scale, with 4 bits each `GROUP` inputs of an output have a scale
    and an offset, which map the lowest weight to -8 and the highest to 7; equal weights are 0, and
    the offset has their value.

    Args:
        weight_OI: Weight in a floating-point dtype.
        bits: 8 or 4.
        dtype: Dtype of the products; scales are rounded to it before they are used.
    """
    wide_OI = weight_OI.to(torch.promote_types(weight_OI.dtype, torch.float32))
    if bits == 8:
        highest_O1 = wide_OI.abs().amax(dim=1, keepdim=True)
        scale_O1 = _positive(_rounded(highest_O1 / 127, dtype))
        values_OI = (wide_OI / scale_O1).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight(8, values_OI, scale_O1.to(dtype))
    assert bits == 4
    if wide_OI.shape[1] % GROUP:
        return None
    wide_OGN = wide_OI.unflatten(1, (-1, GROUP))
    low_OG1, high_OG1 = wide_OGN.amin(dim=2, keepdim=True), wide_OGN.amax(dim=2, keepdim=True)
    step_OG1 = _rounded((high_OG1 - low_OG1) / 15, dtype)
    offset_OG1 = _rounded(low_OG1 + 8 * step_OG1, dtype)
    scale_OG1 = _positive(step_OG1)
    values_OGN = ((wide_OGN - offset_OG1) / scale_OG1).round().clamp(-8, 7).to(torch.int8)
    scale_OG, offset_OG = (one.squeeze(2).to(dtype) for one in (scale_OG1, offset_OG1))
    return QuantizedWeight(4, values_OGN.flatten(1), scale_OG, offset_OG)


def _rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as *dtype* has them, in their own dtype."""
    return wide.to(dtype).to(wide.dtype)


def _positive(scale: Tensor) -> Tensor:
    """Return scales with 1 in place of 0."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def expanded_projection(
    weight: QuantizedWeight, bias_O: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return x -> x @ weight.T + bias that expands the weight for each product.

    It keeps the memory of a quantized weight, and takes longer than a weight that is not quantized.

    Args:
        weight: Quantized weight.
        bias_O: Bias in the dtype of the products; None for none.
    """
    stored = _packed(weight.values_OI) if weight.bits == 4 else weight.values_OI
    scale_OG1 = weight.scale_OG.unsqueeze(2)
    offset_OG1 = None if weight.offset_OG is None else weight.offset_OG.unsqueeze(2)
    bits, group = weight.bits, weight.group_size

    def project(x_MI: Tensor) -> Tensor:
        values_OI = _unpacked(stored) if bits == 4 else stored
        wide = torch.promote_types(scale_OG1.dtype, torch.float32)
        weight_OGN = values_OI.unflatten(1, (-1, group)).to(wide).mul_(scale_OG1)
        if offset_OG1 is not None:
            weight_OGN.add_(offset_OG1)
        return functional.linear(x_MI, weight_OGN.flatten(1).to(scale_OG1.dtype), bias_O)

    return project


def _packed(values_OI: Tensor) -> Tensor:
    """Return values of 4 bits, two in a byte."""
    codes = (values_OI + 8).to(torch.uint8)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    """Return the int8 values that `_packed` took."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=2)
    return pairs.flatten(1).to(torch.int8) - 8
