"""Attention and rotary position embedding of models of `transformers`.

Attention goes through the library's own registry of attention functions.  The rotary function is a
global of the model's Python module; only the model's own attention modules get another one.

Shapes: B batch, N heads, K key/value heads, S queries, T keys, D head channels.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.library.module_kernels.choice import (
    Choice,
    differs,
    not_comparable,
    own_function,
)
from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.op_calls import OpCalls

__all__ = ["is_attention", "replace_attention", "replace_rotary"]

_NAMES = (f"lmcore_{number}" for number in itertools.count())
_ROTARY = "apply_rotary_pos_emb"
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
_CHOSEN = "_attn_implementation_internal"
"""Attribute of configurations; the public one changes the configurations of parts, too."""

_OTHER_OPTIONS = ("sliding_window", "softcap", "position_bias", "s_aux", "head_mask", "cache")
"""Arguments of attention functions that the op does not have."""


def is_attention(module: nn.Module) -> bool:
    """Return True for a module that calls the library's attention functions."""
    code = getattr(type(module).forward, "__code__", None)
    called = code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
    return called and hasattr(module, "config")


def replace_attention(
    model: nn.Module, modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport
) -> None:
    """Register the device's kernel as an attention function, and choose it in the configuration."""
    attentions: list[Any] = [module for module in modules if is_attention(module)]
    library = sys.modules.get("transformers.modeling_utils")
    if not attentions or library is None:
        return
    part, count = type(attentions[0]).__name__, len(attentions)
    names = {module.config._attn_implementation for module in attentions}  # noqa: SLF001
    choice = Choice(
        calls,
        "attention",
        next(attentions[0].parameters()).dtype,
        own=own_function("attention"),
        causal=True,
        **_sizes(attentions[0]),
    )
    reason = choice.reason
    if names != {"sdpa"}:
        named = ", ".join(f"`{name}`" for name in sorted(map(str, names)))
        reason = f"the model's attention implementation is {named}, and only `sdpa` is replaced"
    if reason is not None:
        report.add_kept(part, count, reason)
        return
    masks = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    functions, name = library.ALL_ATTENTION_FUNCTIONS, next(_NAMES)
    functions.register(name, _attention(choice, functions["sdpa"], report))
    masks.register(name, masks["sdpa"])
    memo: dict[int, Any] = {}
    configs: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(getattr(module, "config", None), _CHOSEN):
            # A copy: other models may have been, or will be, made from the same configuration.
            config: Any = copy.deepcopy(module.config, memo)
            module.config, configs[id(config)] = config, config
    chosen = [config for config in configs.values() if getattr(config, _CHOSEN) == "sdpa"]
    for config in chosen:
        setattr(config, _CHOSEN, name)

    def restore() -> None:
        functions.register(name, functions["sdpa"])  # for copies of the model
        for config in chosen:
            if getattr(config, _CHOSEN) == name:  # the user may have chosen another one since
                setattr(config, _CHOSEN, "sdpa")

    report.changes.on_undo(restore)
    report.add_replaced(part, count, choice.resolution)


def _sizes(module: Any) -> dict[str, Any]:
    """Return the attributes of the op that the module names."""
    config = module.config
    dropout = next((value for name in _DROPOUTS if (value := getattr(module, name, None))), 0.0)
    found = {
        "head_dim": getattr(module, "head_dim", None),
        "num_attention_heads": getattr(config, "num_attention_heads", None),
        "num_query_groups": getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_attention_heads", None),
        "seq_length": getattr(config, "max_position_embeddings", None),
        "dropout": getattr(dropout, "p", dropout),
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _attention(
    choice: Choice, own: Callable[..., Any], report: KernelReport
) -> Callable[..., tuple[Tensor, None]]:
    """Return the attention function that runs the kernel, or *own* if the op is not the case."""
    call, own_calls = choice.call, report.own_calls

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,  # noqa: FBT001  # the library's own signature
        **options: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and attention_mask is None and query.shape[2] > 1
        is_compiling = torch.compiler.is_compiling()
        reason = None
        if not is_compiling:
            reason = _other_case(query, key, value, attention_mask, scaling, options)
            if reason is None and causal and query.shape[2] != key.shape[2]:
                reason = "attention: more keys than queries, without a mask"
            if reason is None and not choice.takes(query, key):
                reason = f"attention: the kernel is not for {query.dtype} on {query.device.type}"
            if reason is not None:
                own_calls[reason] += 1
        if is_compiling or reason is not None:
            out: tuple[Tensor, None] = own(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **options,
            )
            return out
        if attention_mask is None:
            out_BNSD = call(query, key, value, causal=causal, dropout=dropout)
        else:
            hidden = ~attention_mask
            out_BNSD = call(query, key, value, causal=False, dropout=dropout, mask=hidden)
        return out_BNSD.transpose(1, 2).contiguous(), None

    return attention


def _other_case(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> str | None:
    """Return why a call is not the op; None if it is."""
    given = [name for name in _OTHER_OPTIONS if options.get(name) is not None]
    if given:
        return f"attention: with `{given[0]}`"
    if mask is not None and mask.dtype is not torch.bool:
        return "attention: the mask is added to the scores"
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
        return "attention: the scale is not 1/sqrt(head_dim)"
    if query.dim() != 4 or query.shape[0] != key.shape[0] or value.shape[-1] != query.shape[-1]:
        return "attention: queries, keys and values differ in batch or width"
    return None


def replace_rotary(
    model: nn.Module, modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport
) -> None:
    """Give the attention modules a rotary function that runs the kernel."""
    found: dict[Any, list[nn.Module]] = {}
    for module in modules:
        function = type(module).forward
        code = getattr(function, "__code__", None)
        if code is not None and _ROTARY in code.co_names:
            found.setdefault(function, []).append(module)
    for function, alike in found.items():
        part = f"rotary embedding of {type(alike[0]).__name__}"
        own = function.__globals__[_ROTARY]
        parameter = next(model.parameters())
        width = getattr(alike[0], "head_dim", None) or 64
        choice = Choice(calls, "rotary_embedding", parameter.dtype, head_dim=width)
        new = _rotary(choice, own)
        reason = choice.reason or _rotary_difference(
            model, function, choice, own, new, parameter, width
        )
        if reason is not None:
            report.add_kept(part, len(alike), reason)
            continue
        forward = _with_rotary(function, new)
        for module in alike:
            report.changes.set_forward(module, forward)
        report.add_replaced(part, len(alike), choice.resolution)


def _with_rotary(function: Any, rotary: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass with another rotary function; a compiler traces its own."""
    names = {**function.__globals__, _ROTARY: rotary}
    code, defaults, cells = function.__code__, function.__defaults__, function.__closure__
    other = FunctionType(code, names, function.__name__, defaults, cells)
    other.__kwdefaults__ = function.__kwdefaults__

    @functools.wraps(function)
    def forward(*args: Any, **options: Any) -> Any:
        return (function if torch.compiler.is_compiling() else other)(*args, **options)

    forward.__module__ = __name__
    return forward


def _rotary(choice: Choice, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rotary function of queries and keys: the kernel for one sequence of positions."""
    call, takes = choice.call, choice.takes

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        plain = not args and not options and cos.dim() == 3 and cos.shape[0] == 1 and q.dim() == 4
        if not (plain and cos.shape[-1] == q.shape[-1] and takes(q, cos)):
            out: tuple[Tensor, Tensor] = own(q, k, cos, sin, *args, **options)
            return out
        half = cos.shape[-1] // 2
        cos_SR, sin_SR = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        return call(q, cos_SR, sin_SR), call(k, cos_SR, sin_SR)

    return apply_rotary_pos_emb


def _rotary_difference(
    model: nn.Module,
    function: Callable[..., Any],
    choice: Choice,
    own: Callable[..., Any],
    new: Callable[..., Any],
    parameter: Tensor,
    width: int,
) -> str | None:
    """Return why the op is not the model's rotation; None if it is."""
    if (reason := not_comparable(parameter)) is not None:
        return reason
    angles = _angles(model, function, parameter)
    if angles is None:
        return "no module of the model gives cosine and sine of each pair twice"
    cos, sin = angles
    if cos.shape[-1] != width:
        return f"{cos.shape[-1]} of {width} channels of a head are rotated"
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, heads, cos.shape[1], width, generator=generator) for heads in (4, 2))
    return differs(choice.spec, own, new, q.to(parameter), k.to(parameter), cos, sin)


def _angles(
    model: nn.Module, function: Callable[..., Any], parameter: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine for some positions from the model, [1, S, D], the halves equal."""
    positions = torch.arange(5, device=parameter.device).unsqueeze(0)
    x = parameter.new_zeros(1, 5, 8)
    for module in model.modules():
        if (
            type(module).__module__ != function.__module__
            or "position_ids" not in inspect.signature(type(module).forward).parameters
            or not hasattr(module, "inv_freq")
        ):
            continue
        with torch.no_grad():
            found = module(x, position_ids=positions)
        if not isinstance(found, tuple) or len(found) != 2:
            continue
        cos, sin = found
        if all(torch.equal(*each.chunk(2, dim=-1)) for each in (cos, sin)):
            return cos, sin
    return None
