"""Compile every Triton kernel for a GPU that is not here, and record what a compiled block sees.

Run as `compile_worker.py CAPABILITY compiled widest traced`, in a separate process: Triton
decides at import whether its kernels are interpreted.  A stand-in for the driver names the GPU;
launches are turned into compilations of exactly what would have been launched.  Prints one JSON
object.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lmcore_triton.activation import bias_gelu, swiglu
from lmcore_triton.cross_entropy import cross_entropy
from lmcore_triton.dropout import bias_dropout_add
from lmcore_triton.linear_cross_entropy import linear_cross_entropy
from lmcore_triton.norm import layer_norm, rms_norm
from lmcore_triton.offers import WIDEST_NORM, WIDEST_SOFTMAX
from lmcore_triton.rotary import rotary_embedding
from lmcore_triton.softmax import scaled_masked_softmax


class Driver:
    """Driver as Triton needs it to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def calls() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]]:
    """Yield each op as a model calls it under autocast: inputs in bfloat16, weights in float32."""
    wide = torch.float32
    x, gain, offset = draw(2, 16, 768), draw(768, dtype=wide), draw(768, dtype=wide)
    yield "layer_norm", layer_norm, (x, gain, offset, 1e-5), {}
    yield "rms_norm", rms_norm, (x, gain, 1e-5), {}
    yield "bias_gelu", bias_gelu, (draw(2, 16, 3072), draw(3072, dtype=wide)), {}
    yield "swiglu", swiglu, (draw(2, 16, 2048),), {}
    added = (x, offset, draw(2, 16, 768))
    yield "dropout", bias_dropout_add, added, {"dropout": 0.1, "training": True}
    yield "no_dropout", bias_dropout_add, added, {"dropout": 0.0, "training": True}
    mask = torch.ones(16, 128, dtype=torch.bool).triu(1)
    yield "scaled_masked_softmax", scaled_masked_softmax, (draw(2, 4, 16, 128), mask, 0.5), {}
    heads = draw(2, 16, 12, 64).transpose(1, 2)
    angles = torch.randn(16, 32), torch.randn(16, 32)
    yield "rotary_embedding", rotary_embedding, (heads, *angles), {}
    targets = torch.randint(512, (32,))
    yield "cross_entropy", cross_entropy, (draw(32, 50304), targets), {}
    head = draw(32, 64), draw(512, 64), targets, torch.rand(32)
    yield "linear_cross_entropy", linear_cross_entropy, head, {}


def widest_calls() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]]:
    """Yield the ops that keep a row in registers, with the longest that they take."""
    wide = torch.float32
    x, gain = draw(1, WIDEST_NORM), draw(WIDEST_NORM, dtype=wide)
    yield "layer_norm", layer_norm, (x, gain, draw(WIDEST_NORM, dtype=wide), 1e-5), {}
    yield "scaled_masked_softmax", scaled_masked_softmax, (draw(4, WIDEST_SOFTMAX), None, 0.5), {}


def stack_bytes(binary: bytes) -> int:
    """Return the bytes of memory that a thread of a kernel has for what registers do not hold."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", output).group(1))  # type: ignore[union-attr]


def compiled() -> dict[str, Any]:
    """Return the result of each kernel's compilation."""
    return compiling(calls)


def widest() -> dict[str, Any]:
    """Return the same for the longest rows."""
    return compiling(widest_calls)


def compiling(made: Callable[[], Iterator[Any]]) -> dict[str, Any]:
    """Compile the kernels of calls, and launch none."""
    found: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(
        self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any
    ) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **named)
        ptx, ttir = kernel.asm["ptx"], kernel.asm["ttir"]
        found[self.__name__] = {
            "binary": len(kernel.asm["cubin"]),
            "stack": stack_bytes(kernel.asm["cubin"]),
            "target": re.search(r"\.target (\w+)", ptx).group(1),  # type: ignore[union-attr]
            "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
            "widest": max(map(int, re.findall(r"\.global\.v(\d)", ptx)), default=1),
            "wide_rows": bool(re.search(r"arith\.muli .*: (?:tensor<.*)?i64", ttir)),
        }
        return kernel

    JITFunction.run = compile_only
    try:
        for _, call, arguments, named in made():
            out = call(*arguments, **named)
            out.backward(torch.ones_like(out))
    finally:
        JITFunction.run = launch
    return found


def traced() -> dict[str, Any]:
    """Return for each op the steps of its compiled graphs, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd

    found: dict[str, Any] = {}
    for name, call, arguments, named in calls():
        graphs: list[list[str]] = []
        torch._dynamo.reset()
        keep = aot_autograd(fw_compiler=_keeper(graphs), bw_compiler=_keeper(graphs))

        def block(*tensors: Any, call: Any = call, named: Any = named) -> Tensor:
            return call(*tensors, **named) * 2

        out = torch.compile(block, backend=keep, fullgraph=True, dynamic=False)(*arguments)
        out.backward(torch.ones_like(out))
        found[name] = graphs
    return found


def _keeper(graphs: list[list[str]]) -> Callable[..., Any]:
    """Return a compiler that notes the steps of a graph, whose results are then empty."""
    from functorch.compile import make_boxed_func

    def note(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        graphs.append([_step(node) for node in nodes if "getitem" not in str(node.target)])
        results = [
            node if node is None else node.meta["val"]
            for node in module.graph.output_node().args[0]  # type: ignore[union-attr]
        ]
        return make_boxed_func(
            lambda *_: tuple(
                result
                if result is None
                else torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
                for result in results
            )
        )

    return note


def _step(node: torch.fx.Node) -> str:
    if "triton" not in str(node.target) or "tensors_to_clone" not in node.kwargs:
        return str(node.target)
    return "kernel writes " + " ".join(sorted(node.kwargs["tensors_to_clone"]))  # type: ignore[arg-type]


if __name__ == "__main__":
    driver.set_active(Driver(int(sys.argv[1])))
    results = {"compiled": compiled, "widest": widest, "traced": traced}
    print(json.dumps({name: results[name]() for name in sys.argv[2:]}))
