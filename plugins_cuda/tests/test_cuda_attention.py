"""Attention kernels against the reference in float64, gradients included, on CPU tensors.

Shapes: B batch, S queries, T keys, N heads, K key/value heads, D head channels.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from lmcore.contract.op import reference
from lmcore.contract.torch_versions import ATTENTION_KERNELS
from lmcore_cuda.attention import flex, sdpa

_SPEC = importlib.util.spec_from_file_location(
    "kernel_cases", Path(__file__).parents[2] / "tests/unit/contract/kernel_cases.py"
)
kernel_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernel_cases)
inputs, documents = kernel_cases.attention_inputs, kernel_cases.documents
compare = kernel_cases.compare_attention
with_gradients = kernel_cases.with_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["attention", "attention_expanded", "attention_cudnn"])
def test_sdpa(kernel: str, shared: int, dtype: torch.dtype) -> None:
    """Attention by torch is the op's, with and without shared keys, causal or not."""
    function = getattr(sdpa, kernel)
    for causal in (True, False):
        compare(function, inputs(dtype, shared=shared), causal=causal)


@pytest.mark.parametrize("queries,keys", [(1, 40), (24, 40), (40, 40), (1, 1)])
def test_sdpa_with_fewer_queries_than_keys(queries: int, keys: int) -> None:
    """The causal triangle ends at the last key, as after a cache or in a part of a sequence."""
    compare(
        sdpa.attention,
        inputs(torch.float32, queries=queries, keys=keys, shared=2),
        causal=True,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_with_a_mask(*, causal: bool) -> None:
    """A mask hides what is True in it, and what causality hides besides."""
    compare(sdpa.attention, inputs(torch.float32, shared=2), causal=causal, mask=documents())


def test_sdpa_lower_right() -> None:
    """On a GPU the triangle of fewer queries than keys is named, not written out."""
    seen: list[Any] = []

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                seen.append(kwargs)
                return args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    q, k, v = (x.as_subclass(OnGpu) for x in inputs(torch.bfloat16, queries=24, keys=40))
    sdpa.attention(q, k, v, causal=True)
    bias = seen[0]["attn_mask"]
    assert (bias.variant.name, bias.seq_len_q, bias.seq_len_kv) == ("LOWER_RIGHT", 24, 40)
    assert not seen[0].get("is_causal")


def test_sdpa_drops_out() -> None:
    """Dropout removes about its share of the weights and keeps their mean."""
    torch.manual_seed(1)
    q, k, _ = inputs(torch.float32, queries=400, keys=400)
    ones = torch.ones_like(k)
    out = sdpa.attention(q, k, ones, causal=False, dropout=0.25)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.02


def test_flash_alone() -> None:
    """The flash backend is used if it supports the case, and torch's default otherwise."""
    compare(sdpa.attention_flash, inputs(torch.bfloat16), causal=True)
    compare(sdpa.attention_flash, inputs(torch.float32), causal=True)
    compare(sdpa.attention_flash, inputs(torch.bfloat16), causal=True, mask=documents())


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_packages(version: int, install: Any) -> None:
    """Each version gets views of [B, S, N, D] and gives the op's result; the rest goes to torch."""
    install("flash-attn" if version == 2 else f"flash-attn-{version}")
    kernel = importlib.import_module(f"lmcore_cuda.attention.flash{version}").attention
    compare(kernel, inputs(torch.bfloat16, shared=2), causal=True)
    compare(kernel, inputs(torch.bfloat16), causal=False)
    compare(kernel, inputs(torch.float16, queries=24, keys=40), causal=True)
    compare(kernel, inputs(torch.float32), causal=True)
    compare(kernel, inputs(torch.bfloat16), causal=True, mask=documents())


def test_flash_2_gets_no_copies(install: Any) -> None:
    """Queries are passed where they lie, and dropout and determinism are passed on."""
    install("flash-attn")
    kernel = importlib.import_module("lmcore_cuda.attention.flash2").attention
    calls = sys.modules["flash_attn"].calls
    q, k, v = inputs(torch.bfloat16)
    kernel(q, k, v, causal=True, dropout=0.1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        kernel(q, k, v, causal=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert [(call["dropout_p"], call["deterministic"]) for call in calls] == [
        (0.1, False),
        (0.0, True),
    ]
    assert calls[0]["q"].data_ptr() == q.data_ptr()
    assert calls[0]["q"].is_contiguous()


def test_flash_3_before_it_was_settled(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early versions return the logsumexp too."""
    install("flash-attn-3")
    module = importlib.import_module("lmcore_cuda.attention.flash3")
    plain = module.flash_attn_func
    monkeypatch.setattr(module, "flash_attn_func", lambda *a, **k: (plain(*a, **k), None))
    compare(module.attention, inputs(torch.bfloat16), causal=True)


@pytest.fixture
def activations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replace torch's registration of versions 3 and 4; undo it."""
    if not ATTENTION_KERNELS:
        pytest.skip("this torch registers no other kernels")
    from torch.nn.attention import _registry as registry

    done: list[str] = []

    class Handle:
        def remove(self) -> None:
            done.append("removed")

    def put(name: str) -> Callable[[], Handle]:
        def register() -> Handle:
            done.append(name)
            return Handle()

        return register

    for name in ("FA3", "FA4"):
        assert name in registry.list_flash_attention_impls()
        monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, name, put(name))
    yield done
    registry.restore_flash_attention_impl(_raise_warn=False)


def test_activated(activations: list[str]) -> None:
    """Loading the kernel puts the version in torch's place once; another name does nothing."""
    module = importlib.import_module("lmcore_cuda.attention.activated")
    assert module.flash3 is sdpa.attention_flash
    assert module.flash3 is sdpa.attention_flash
    assert activations == ["FA3"]
    assert module.flash4 is sdpa.attention_flash
    assert activations == ["FA3", "removed", "FA4"]
    with pytest.raises(AttributeError, match="flash5"):
        _ = module.flash5


@pytest.mark.parametrize(
    "mask",
    [documents(), documents()[:1], documents()[0, 0], documents()[:, :, 32:96, :128]],
    ids=["whole", "one for all", "two dims", "part"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_block_mask(mask: Tensor, *, causal: bool) -> None:
    """Whole and partial blocks together show exactly what the mask shows; hidden ones nothing."""
    queries, keys = mask.shape[-2:]
    visible = ~mask[(None,) * (4 - mask.dim())]
    if causal:
        visible = visible & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    found = flex.block_mask(mask, queries, keys, causal=causal)
    size = flex.BLOCK
    shown = torch.zeros(*visible.shape[:2], -(-queries // size), -(-keys // size))
    for counts, indices, value in (
        (found.kv_num_blocks, found.kv_indices, 1),
        (found.full_kv_num_blocks, found.full_kv_indices, 2),
    ):
        assert counts is not None
        assert indices is not None
        for at in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            for block in indices[tuple(at)][: counts[tuple(at)]].tolist():
                shown[(*at, block)] += value
    for at in torch.cartesian_prod(*(torch.arange(n) for n in shown.shape)).tolist():
        batch, head, row, column = at
        block = visible[
            batch, head, row * size : (row + 1) * size, column * size : (column + 1) * size
        ]
        wanted = 0 if not block.any() else 2 if block.numel() == size**2 and block.all() else 1
        assert shown[tuple(at)] == wanted
    q, k = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    for batch in range(visible.shape[0]):
        told = found.mask_mod(torch.tensor(batch), torch.tensor(0), q, k)
        assert torch.equal(told, visible[batch, 0])


def test_documents_hide_blocks() -> None:
    """Of a long sample of short documents most blocks are hidden."""
    number = torch.arange(1024) // 128
    mask = (number[:, None] != number[None, :])[None, None]
    found = flex.block_mask(mask, 1024, 1024, causal=True)
    assert found.kv_num_blocks.sum() == 8
    assert found.full_kv_num_blocks is not None
    assert found.full_kv_num_blocks.sum() == 0


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let FlexAttention run backward on the CPU, where its plain computation can do it."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is slow without a compiler, as it says
        yield


def test_flex(flex_on_cpu: None) -> None:
    """FlexAttention with the block mask is the op's, shared keys and parts of a mask included."""
    kernel = flex.FlexAttention(flex_module.flex_attention)
    qkv = inputs(torch.float32, shared=2)
    compare(kernel, qkv, causal=True, mask=documents())
    part = inputs(torch.float32, queries=64, keys=128)
    compare(kernel, part, causal=True, mask=documents()[:, :, 32:96, :128])
    compare(kernel, qkv, causal=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, to itself
def test_flex_inside_a_compiled_block(flex_on_cpu: None) -> None:
    """A compiled block takes it in whole, block mask included, without a break."""
    kernel = flex.FlexAttention()

    def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor) -> Tensor:
        return kernel(q * 1.0, k, v, causal=causal, dropout=0.0, mask=mask) * 1.0

    compiled = torch.compile(block, backend="eager", fullgraph=True)
    qkv = inputs(torch.float32)
    found = with_gradients(compiled, qkv, causal=True, mask=documents())
    expected = with_gradients(
        reference.attention, tuple(x.double() for x in qkv), causal=True, mask=documents()
    )
    for tensor, right in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.double(), right, atol=1e-4, rtol=1e-4)


def test_block_masks_are_kept_while_the_mask_lives() -> None:
    """Layers share the blocks of one mask; a changed mask gets new ones, a dead one's are gone."""
    kernel = flex.FlexAttention()
    mask = documents()
    first = kernel.blocks(mask, 160, 160, causal=True)
    assert kernel.blocks(mask, 160, 160, causal=True) is first
    assert kernel.blocks(mask, 160, 160, causal=False) is not first
    part = kernel.blocks(mask[:, :, 32:96], 64, 160, causal=True)
    assert kernel.blocks(mask[:, :, 32:96], 64, 160, causal=True) is part
    assert kernel.blocks(mask[:, :, 64:128], 64, 160, causal=True) is not part
    mask[:] = False
    assert kernel.blocks(mask, 160, 160, causal=True) is not first
    assert len(kernel._known) == 1
    del mask
    gc.collect()
    assert len(kernel._known) == 0


def test_block_masks_in_inference() -> None:
    """A mask made in inference mode, which shows no change, gets its blocks computed each time."""
    kernel = flex.FlexAttention()
    with torch.inference_mode():
        mask = documents()
        assert kernel.blocks(mask, 160, 160, causal=True).kv_num_blocks.sum() > 0
    assert len(kernel._known) == 0
