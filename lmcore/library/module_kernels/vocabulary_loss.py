"""The loss of a model of `transformers` without its logits, which are computed if they are read.

With labels the head returns `LazyLogits`, a tensor that holds the hidden states and the weight of
the head.  The library's loss function takes these from it for `linear_cross_entropy`; any other
operation on the tensor computes the logits first, and gradients flow through them.

Shapes: B batch, S sequence, T tokens (B*S), H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from lmcore.library.module_kernels.choice import Choice
from lmcore.library.module_kernels.report import KernelReport, NotPickled
from lmcore.library.op_calls import OpCalls

__all__ = ["LazyLogits", "replace_loss"]


class LazyLogits(Tensor):
    """Logits [B, S, V] that are computed when an operation reads them; made by `_empty_logits`.

    Attributes:
        source: Hidden states and the weight of the head, with their gradient graph.
        hidden: Hidden states without it.
        weight: Weight without it.
        versions: Versions of both at the forward pass: numbers of their changes in place.
        logits: The computed logits; None before.
    """

    source: tuple[Tensor, Tensor] | None
    hidden: Tensor
    weight: Tensor
    versions: tuple[int, int]
    logits: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the computed logits."""
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def computed(self) -> Tensor:
        """Return the logits as a plain tensor without a gradient graph; computed once.

        Raises:
            RuntimeError: The weight has changed or was freed since the forward pass.
        """
        if self.logits is None:
            freed = not self.weight.untyped_storage().size()  # sharded, and gathered for a pass
            if freed or self.versions != _versions(self.hidden, self.weight):
                raise RuntimeError(
                    "the logits of this forward pass cannot be computed any more: the weights "
                    f"{'were freed' if freed else 'have changed'} since. Read the logits before "
                    "the optimizer's step, or call `use_kernels(model, fused_loss=False)`."
                )
            with torch.no_grad():
                hidden, weight = self.hidden.to(self.dtype), self.weight.to(self.dtype)
                self.logits = functional.linear(hidden, weight)
        return self.logits

    def numpy(self, *, force: bool = False) -> Any:
        """Return the logits as an array."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "can't call numpy() on a tensor that requires grad: use `tensor.detach().numpy()`"
            )
        return self.computed().numpy(force=force)

    def tolist(self) -> Any:
        """Return the logits as lists."""
        return self.computed().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a plain tensor is pickled as."""
        return self.computed().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text of the computed logits."""
        return repr(self.computed())


def _empty_logits(hidden_BSH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> LazyLogits:
    """Return logits that have only shape, dtype and device."""
    made = Tensor._make_wrapper_subclass(  # noqa: SLF001
        LazyLogits,
        (*hidden_BSH.shape[:-1], weight_VH.shape[0]),
        dtype=dtype,
        device=hidden_BSH.device,
    )
    assert isinstance(made, LazyLogits)
    made.source, made.logits = None, None
    made.hidden, made.weight = hidden_BSH.detach(), weight_VH.detach()
    made.versions = _versions(hidden_BSH, weight_VH)
    return made


def _versions(hidden_BSH: Tensor, weight_VH: Tensor) -> tuple[int, int]:
    return hidden_BSH._version, weight_VH._version  # noqa: SLF001


class _Head(torch.autograd.Function):
    """hidden @ weight.T, whose result is not computed before it is read."""

    @staticmethod
    def forward(ctx: Any, hidden_BSH: Tensor, weight_VH: Tensor, dtype: torch.dtype) -> LazyLogits:
        ctx.save_for_backward(hidden_BSH, weight_VH)
        return _empty_logits(hidden_BSH, weight_VH, dtype)

    @staticmethod
    def backward(ctx: Any, grad_BSV: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BSH, weight_VH = ctx.saved_tensors
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        dtype = grad_BSV.dtype
        grad_hidden = grad_BSV @ weight_VH.to(dtype) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            rows_TH = hidden_BSH.to(dtype).reshape(-1, hidden_BSH.shape[-1])
            grad_weight = grad_BSV.reshape(-1, grad_BSV.shape[-1]).t() @ rows_TH
        return grad_hidden, grad_weight, None


def _lazy_logits(hidden_BSH: Tensor, weight_VH: Tensor) -> LazyLogits:
    kind = hidden_BSH.device.type
    dtype = torch.promote_types(hidden_BSH.dtype, weight_VH.dtype)
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    logits: LazyLogits = _Head.apply(hidden_BSH, weight_VH, dtype)  # type: ignore[no-untyped-call]
    logits.source = (hidden_BSH, weight_VH)
    return logits


def replace_loss(
    modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport, *, wanted: bool
) -> None:
    """Fuse the vocabulary head with the loss, in training with labels."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for model in modules:
        head = model.get_output_embeddings() if isinstance(model, library.PreTrainedModel) else None
        if isinstance(head, nn.Linear) and head in modules:
            _fuse(model, head, calls, report, wanted=wanted)


def _fuse(
    model: nn.Module, head: nn.Linear, calls: OpCalls, report: KernelReport, *, wanted: bool
) -> None:
    part = f"loss of {type(model).__name__}"
    own: Any = model.loss_function
    library = sys.modules["transformers.loss.loss_utils"]
    bias: Tensor | None = head.bias
    vocab, hidden = head.weight.shape
    choice = Choice(
        calls, "linear_cross_entropy", head.weight.dtype, vocab_size=vocab, hidden_size=hidden
    )
    reason = choice.reason
    if not wanted:
        reason = "`fused_loss=False`"
    elif own is not library.ForCausalLMLoss:
        reason = "its loss function is not the library's `ForCausalLMLoss`"
    elif bias is not None:
        reason = "the head has a bias, and the op has none"
    elif "labels" not in inspect.signature(type(model).forward).parameters:
        reason = "its forward pass takes no labels"
    if reason is not None:
        report.add_kept(part, 1, reason)
        return
    state = threading.local()
    before = vars(head).get("forward")
    project = type(head).forward if before is None else before.__func__
    report.changes.set_forward(head, _projection(choice, project, state, report))
    report.changes.set_attribute(model, "_loss_function", _loss(choice, own, state, report))
    position = list(inspect.signature(type(model).forward).parameters).index("labels") - 1
    watch = _LabelWatch(state, position)
    for handle in (
        model.register_forward_pre_hook(watch.before, with_kwargs=True),
        model.register_forward_hook(watch.after, always_call=True),
    ):
        report.changes.on_undo(handle.remove)
    report.add_replaced(part, 1, choice.resolution)


class _LabelWatch(NotPickled):
    """Hooks of a model that record if its forward pass has labels.

    Attributes:
        state: Record of each thread.
        position: Position of the labels among the arguments.
    """

    def __init__(self, state: threading.local, position: int) -> None:
        self.state, self.position = state, position

    def before(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            labels = args[self.position] if len(args) > self.position else None
            self.state.with_labels = options.get("labels", labels) is not None and module.training

    def after(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.state.with_labels = False


def _projection(
    choice: Choice, own: Callable[..., Any], state: threading.local, report: KernelReport
) -> Callable[..., Any]:
    """Return the head's forward pass, without computing the logits if labels are given."""

    def forward(self: Any, hidden_BSH: Tensor) -> Any:
        weight = self.weight
        if torch.compiler.is_compiling() or not getattr(state, "with_labels", False):
            return own(self, hidden_BSH)
        if torch.is_grad_enabled():
            if choice.takes(hidden_BSH, weight):
                return _lazy_logits(hidden_BSH, weight)
            report.own_calls[f"loss: {hidden_BSH.dtype} and a weight in {weight.dtype}"] += 1
        state.with_labels = False
        return own(self, hidden_BSH)

    return forward


def _loss(
    choice: Choice, own: Callable[..., Any], state: threading.local, report: KernelReport
) -> Callable[..., Any]:
    """Return the library's loss function, fused for `LazyLogits`."""

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        source = logits.source if isinstance(logits, LazyLogits) else None
        if source is None or vocab_size != logits.shape[-1]:
            if not torch.compiler.is_compiling() and getattr(state, "with_labels", False):
                report.own_calls["loss: the model changes the logits before the loss"] += 1
            loss: Tensor = own(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **options,
            )
            return loss
        hidden_BSH, weight_VH = source
        if torch.is_autocast_enabled(logits.device.type):  # as the head's own product
            hidden_BSH, weight_VH = hidden_BSH.to(logits.dtype), weight_VH.to(logits.dtype)
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target_T = shift_labels.reshape(-1).to(hidden_BSH.device)
        counted_T = target_T != ignore_index
        count = counted_T.sum()
        number: Any = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if isinstance(number, Tensor):
            number = number.to(hidden_BSH.device)
        fused: Tensor = choice.call(
            hidden_BSH.reshape(-1, hidden_BSH.shape[-1]),
            weight_VH,
            target_T.where(counted_T, 0),
            counted_T.float() / number,
        )
        if num_items_in_batch is None:  # without a target NaN, with gradients of 0, as in torch
            fused = torch.where(count > 0, fused, torch.full_like(fused, torch.nan))
        return fused

    return loss_function
