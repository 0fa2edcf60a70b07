"""Matrix products of a computation, counted by op and dtype: the evidence for a precision policy.

torch reports every op below autograd and autocast to a dispatch mode, with the dtypes in which the
device computes.  A product inside a compiled kernel that is no op of torch is not visible.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lmcore.base.errors import DeviceError, LmcoreError
from lmcore.contract.device_errors import first_line
from lmcore.contract.dtype import dtype_name

__all__ = [
    "HEAD",
    "LAYERS",
    "ModelProducts",
    "Product",
    "ProductCounter",
    "counted_products",
    "in_words",
    "is_wider",
]

LAYERS = "layers"
"""Part of a model: its layers."""

HEAD = "head"
"""Part of a model: the projection to the vocabulary, with the loss."""

_ADDS = frozenset({"addmm", "baddbmm", "addbmm"})
_BATCHED = frozenset({"bmm", "baddbmm", "addbmm", "attention", "attn", "flash"})
_WORDS = _ADDS | _BATCHED | {"mm", "matmul", "linear", "gemm", "convolution"}
"""Words in the names of ops.  Products with a vector (`mv`, `dot`) are weighted sums."""


@dataclass(frozen=True)
class Product:
    """A matrix product, attention or convolution.

    Attributes:
        op: Name of torch's op, without namespace and overload.
        dtypes: Dtypes of the factors; one if they are equal.
        backward: True if it is part of a backward pass.
        batched: True for products of attention, and of batches of matrices.
        part: Part of the model that computes it, such as "layers" or "head".
    """

    op: str
    dtypes: tuple[str, ...]
    backward: bool
    batched: bool
    part: str

    @property
    def dtype(self) -> str:
        """Dtype of the factors, in words."""
        return " x ".join(self.dtypes)


@dataclass(frozen=True)
class ModelProducts:
    """Products of one layer of each kind and of the head, in a forward and a backward pass.

    Attributes:
        counts: Number of calls of each product.
        wider: Products that are wider than the policy's, as their kernels widen.
    """

    counts: Counter[Product]
    wider: Counter[Product]

    def wider_words(self, *, head: bool = True) -> str:
        """Return the wider products for the first lines of a run; empty if there are none.

        Args:
            head: False to leave out the head.
        """
        parts = {
            ("the head" if each.part == HEAD else "attention", each.dtype)
            for each in self.wider
            if head or each.part != HEAD
        }
        return "".join(f"; products of {part} in {dtype}" for part, dtype in sorted(parts))

    def to_list(self) -> list[dict[str, Any]]:
        """Return JSON values, for `kernels.json`."""
        return [
            {
                "part": product.part,
                "op": product.op,
                "dtype": product.dtype,
                "pass": "backward" if product.backward else "forward",
                "count": count,
            }
            for product, count in self.counts.items()
        ]


class ProductCounter(TorchDispatchMode):
    """Context that counts the matrix products within it, in forward and backward passes.

    Attributes:
        products: Number of calls of each product.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[Product] = Counter()
        self._part = LAYERS
        self._known: dict[Any, tuple[str, frozenset[str]] | None] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the products within the context for a part of the model.

        Args:
            name: Name of the part.
        """
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler to leave this class out, 2 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, and count it if it is a product."""
        out = func(*args, **(kwargs or {}))
        if func not in self._known:
            self._known[func] = _product_words(func)
        known = self._known[func]
        if known is not None:
            dtypes = _factor_dtypes(func, known[1], args, out)
            if dtypes:
                backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # no public name
                batched = bool(known[1] & _BATCHED)
                self.products[Product(known[0], dtypes, backward, batched, self._part)] += 1
        return out


class _Uncounted(ProductCounter):
    """Counter that is not active: what is computed within it runs without a dispatch mode."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        pass


def counted_products(
    compute: Callable[[ProductCounter], object], device_type: str
) -> Counter[Product]:
    """Run a computation and return the number of calls of its products.

    Args:
        compute: Enters the counter that it gets, and computes.  If it raises, it is called again
            with a counter that is not active.
        device_type: Device type that computes.

    Raises:
        DeviceError: The computation raises within the counter, and not without it.
    """
    counter = ProductCounter()
    try:
        compute(counter)
    except (LmcoreError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _raises(compute):
            raise
        raise DeviceError(
            f"device `{device_type}` cannot compute within a `TorchDispatchMode`",
            why="the products of some layers are counted in such a mode, to prove the dtypes of a "
            f"precision; there it raised {type(error).__name__}: {first_line(error)}, and without "
            "the mode it did not",
            hint="report this to the authors of the device's plugin; "
            "docs/reference/device-requirements.md says what the mode asks of a device",
        ) from error
    return counter.products


def _raises(compute: Callable[[ProductCounter], object]) -> bool:
    """Return True if a computation raises without a dispatch mode, too."""
    try:
        compute(_Uncounted())
    except Exception:  # noqa: BLE001 - the first error is raised
        return True
    return False


def in_words(products: Counter[Product]) -> str:
    """Return the number of products by op and pass: "bmm 24 (8 forward, 16 backward)".

    Args:
        products: Number of calls of each product.
    """
    counts: dict[str, dict[str, int]] = {}
    for product, count in products.items():
        passes = counts.setdefault(product.op, {"forward": 0, "backward": 0})
        passes["backward" if product.backward else "forward"] += count
    totals = {op: sum(passes.values()) for op, passes in counts.items()}
    return ", ".join(
        f"{op} {totals[op]} ({_pass_words(counts[op])})"
        for op in sorted(counts, key=lambda op: -totals[op])
    )


def is_wider(name: str, other: str) -> bool:
    """Return True if a dtype has more bits than another; False for names that torch lacks."""
    widths = [getattr(getattr(torch, dtype, None), "itemsize", 0) for dtype in (name, other)]
    return widths[0] > widths[1] > 0


def _pass_words(passes: Mapping[str, int]) -> str:
    used = {name: count for name, count in passes.items() if count}
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{count} {name}" for name, count in used.items())


def _product_words(func: Any) -> tuple[str, frozenset[str]] | None:
    """Return the name of an op and the words in it, if it is a product."""
    qualified: str = func._schema.name  # noqa: SLF001
    words = frozenset(re.split(r"[:_]+", qualified)) & _WORDS
    return (qualified.rpartition("::")[2].rstrip("_"), words) if words else None


def _factor_dtypes(
    func: Any, words: frozenset[str], args: Sequence[Any], out: Any
) -> tuple[str, ...]:
    """Return the dtypes of the two factors; none if the op has no two matrices.

    An op of another library may cast its arguments itself, also to fewer bits than the result has:
    the narrowest dtype that is visible counts.
    """
    found = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    if func.namespace != "aten":
        found += [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        matrices = [each for each in found if each.is_floating_point() and each.dim() > 1]
        factors = sorted(matrices, key=lambda tensor: tensor.dtype.itemsize)[:1]
    elif len(found) > 1:
        factors = found[1:3] if words & _ADDS else found[:2]
        if any(factor.dim() == 2 and 1 in factor.shape for factor in factors):
            factors = []  # a weighted sum, as of a norm's gradients
    else:
        factors = []
    return tuple(sorted({dtype_name(factor.dtype) for factor in factors}))
