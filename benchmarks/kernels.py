"""Every kernel of this machine's device beside the op's reference: forward, and backward.

The contenders of a case take turns; the figures are medians over the turns, and the ratio is the
median over the turns of the reference's time by the kernel's.  A kernel that rejects a case is
named with its reason.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --ops swiglu rotary_embedding --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.contract import Device, OpTable


@dataclass(frozen=True)
class Size:
    """A model and a micro-batch, as far as an op's inputs depend on them."""

    batch: int
    length: int
    hidden: int
    heads: int
    ffn: int
    vocab: int


SIZES = {
    "small": Size(batch=8, length=256, hidden=256, heads=8, ffn=1024, vocab=8192),
    "124m": Size(batch=1, length=512, hidden=768, heads=12, ffn=3072, vocab=50304),
    "1.7b": Size(batch=2, length=2048, hidden=2304, heads=24, ffn=9216, vocab=50304),
    "toy": Size(batch=2, length=8, hidden=32, heads=2, ffn=64, vocab=96),
}


@dataclass(frozen=True)
class Call:
    """One call: what it is of, its arguments in order, and what is said by name."""

    op: str
    label: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Inputs:
    """Random inputs of a size on a device."""

    def __init__(self, size: Size, device: Device, dtype: torch.dtype) -> None:
        """Draw with a separate generator, so that every contender sees the same."""
        import torch

        self.size, self.device, self.dtype = size, device.torch_device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        """Return a leaf that wants a gradient."""
        import torch

        drawn = torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)
        return drawn.requires_grad_()

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as a model has them: parts of one projection."""
        size = self.size
        shape = (size.batch, size.length, 3, size.heads, size.hidden // size.heads)
        parts = self.draw(*shape).detach().permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = (one.requires_grad_() for one in parts)
        return q, k, v

    def targets(self) -> Tensor:
        """Return a target for each token."""
        import torch

        count = self.size.batch * self.size.length
        drawn = torch.randint(self.size.vocab, (count,), generator=self.generator)
        return drawn.to(self.device)


def calls(made: Inputs) -> Iterator[Call]:
    """Yield the calls to time, in the order of the reference page."""
    import torch

    size = made.size
    tokens, hidden = (size.batch, size.length), size.hidden
    yield Call("attention", "causal", made.heads(), {"causal": True})
    yield Call(
        "layer_norm", "", (made.draw(*tokens, hidden), made.draw(hidden), made.draw(hidden), 1e-5)
    )
    yield Call("rms_norm", "", (made.draw(*tokens, hidden), made.draw(hidden), 1e-6))
    yield Call(
        "linear",
        "",
        (made.draw(*tokens, hidden), made.draw(3 * hidden, hidden), made.draw(3 * hidden)),
    )
    yield Call("bias_gelu", "", (made.draw(*tokens, size.ffn), made.draw(size.ffn)))
    yield Call("swiglu", "", (made.draw(*tokens, 2 * size.ffn),))
    for dropout in (0.0, 0.1):
        branch, bias, residual = (
            made.draw(*tokens, hidden),
            made.draw(hidden),
            made.draw(*tokens, hidden),
        )
        yield Call(
            "bias_dropout_add",
            f"dropout {dropout:g}",
            (branch, bias, residual),
            {"dropout": dropout, "training": True},
            {"dropout": dropout},
        )
    scores = (size.batch, size.heads, size.length, size.length)
    later = torch.ones(size.length, size.length, dtype=torch.bool, device=made.device).triu(1)
    yield Call("scaled_masked_softmax", "no mask", (made.draw(*scores), None, 0.1))
    yield Call("scaled_masked_softmax", "causal mask", (made.draw(*scores), later, 0.1))
    angles = made.draw(size.length, hidden // size.heads // 2).detach().float()
    yield Call("rotary_embedding", "", (made.heads()[0], angles.cos(), angles.sin()))
    count = size.batch * size.length
    yield Call("cross_entropy", "", (made.draw(count, size.vocab), made.targets()))
    weights = torch.full((count,), 1 / count, device=made.device)
    yield Call(
        "linear_cross_entropy",
        "",
        (made.draw(count, hidden), made.draw(size.vocab, hidden), made.targets(), weights),
    )


def step_of(function: Callable[..., Tensor], call: Call) -> Callable[[], object]:
    """Return one forward and backward pass."""
    import torch

    leaves = [one for one in call.arguments if isinstance(one, torch.Tensor) and one.requires_grad]
    grad = torch.randn_like(function(*call.arguments, **call.named))

    def step() -> object:
        out = function(*call.arguments, **call.named)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))

    return step


def seconds(
    steps: Mapping[str, Callable[[], object]], *, turns: int, sync: Callable[[], None]
) -> dict[str, list[float]]:
    """Return seconds of each contender, one value a turn: the median of three."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            three = []
            for _ in range(3):
                sync()
                began = time.perf_counter()
                step()
                sync()
                three.append(time.perf_counter() - began)
            if turn > 1:  # the first two warm up
                taken[name].append(statistics.median(three))
    return taken


def contenders(
    table: OpTable, call: Call, device: Device, dtype: str
) -> dict[str, Callable[..., Tensor]]:
    """Return the reference and each kernel that supports the case; say why another does not."""
    from lmcore.contract.op.context import op_context
    from lmcore.contract.op.records import REFERENCE, load_target

    spec = table.specs[call.op]
    reasons = dict(
        table.resolve(call.op, op_context(spec, device.type, dtype, call.attributes)).rejected
    )
    found = {REFERENCE: load_target(spec.reference)}
    for impl in table.candidates(call.op):
        reason = reasons.get(impl.id, "")
        if reason and "goes first" not in reason and "has priority" not in reason:
            print(f"{call.op:<24}{impl.id:<18}{reason}")
        else:
            found[impl.id] = load_target(impl.load)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device")
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["small", "124m"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int)
    asked = parse(parser, sizes=["toy"], turns=1)
    check(asked)
    from lmcore.config.section import Config
    from lmcore.plugin import build_op_table, create_device, discover, launch_env, select
    from lmcore.runtime.launch.rank import RankInfo

    plugins = discover()
    selection = select(plugins, requested=asked.device)
    os.environ.update(launch_env(plugins, selection, RankInfo().to_dict(), os.environ))
    import torch

    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = create_device(plugins, selection, Config())
    table = build_op_table(plugins, selection, device)
    print(f"{device.name}, {asked.dtype}, torch {torch.__version__}; ms forward and backward")
    for name in asked.sizes:
        print(f"\n{name}: {SIZES[name]}")
        for call in calls(Inputs(SIZES[name], device, getattr(torch, asked.dtype))):
            if asked.ops and call.op not in asked.ops:
                continue
            found = contenders(table, call, device, asked.dtype)
            steps = {}
            for one, function in found.items():
                try:
                    steps[one] = step_of(function, call)
                    steps[one]()
                except Exception as error:  # noqa: BLE001  # the others go on
                    del steps[one]
                    said = f"{type(error).__name__}: {error}".splitlines()[0]
                    print(f"{call.op:<24}{one:<18}FAILED: {said:.200}")
            taken = seconds(steps, turns=asked.turns, sync=device.synchronize)
            for one, values in taken.items():
                pairs = zip(taken["reference"], values, strict=True)
                ratio = statistics.median(base / mine for base, mine in pairs)
                millis = statistics.median(values) * 1e3
                print(f"{call.op:<24}{one:<18}{millis:>9.3f}  x{ratio:<7.2f}{call.label}")


if __name__ == "__main__":
    main()
