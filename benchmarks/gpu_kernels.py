"""The Triton kernels beside all else that a GPU can run an op with: forward and backward.

Contenders of an op: its reference and that compiled, torch's own functions, the Triton kernel in
eager mode and inside a compiled function.  Activations are in the dtype asked for and weights in
float32, as under autocast.  Contenders take turns; before each call a buffer larger than the
device's cache is written, so that inputs come from memory and launches from a queue.  Figures are
medians of the device's own clock, ratios medians over the turns.  A contender whose result is off
is named, and not timed.

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --ops layer_norm swiglu --sizes 124m --json kernels.json

`measure` and `table` are there for a script that measures more.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Function = Callable[..., Tensor]

CONTENDERS = ("reference", "compiled", "torch", "triton", "triton, compiled")
_FLUSH_BYTES = 256 * 2**20
_WINS = 1.02


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
    "124m": Size(batch=16, length=1024, hidden=768, heads=12, ffn=3072, vocab=50304),
    "345m": Size(batch=8, length=1024, hidden=1024, heads=16, ffn=4096, vocab=50304),
    "1.7b": Size(batch=4, length=2048, hidden=2304, heads=24, ffn=9216, vocab=50304),
    "3.6b": Size(batch=2, length=2048, hidden=3072, heads=32, ffn=12288, vocab=50304),
    "tiny": Size(batch=1, length=8, hidden=32, heads=2, ffn=48, vocab=64),
}


@dataclass(frozen=True)
class Call:
    """Call of an op: the op, its arguments, and the equivalent of torch's own functions."""

    op: str
    label: str
    arguments: tuple[Any, ...]
    torch: Function | None = None
    named: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False


@dataclass(frozen=True)
class Row:
    """Measurements of one call.

    Attributes:
        op, label, size: The call.
        millis: Median of each contender's forward and backward pass, in ms.
        ratios: Median over the turns of each contender's time by the Triton kernel's.
        compiled_ratio: The same of the compiled reference by the compiled kernel.
        failed: Contenders that were not timed, with the reason.
    """

    op: str
    label: str
    size: str
    millis: Mapping[str, float]
    ratios: Mapping[str, float]
    compiled_ratio: float | None
    failed: Mapping[str, str]

    @property
    def wins(self) -> tuple[bool, bool]:
        """True if the kernel is the fastest: in eager mode, and inside compiled code."""
        eager = [self.ratios[name] for name in ("reference", "torch") if name in self.ratios]
        here = bool(eager) and min(eager) >= _WINS
        return here, self.compiled_ratio is not None and self.compiled_ratio >= _WINS


def calls(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls to time, in the order of the ops' page."""
    import torch
    from torch.nn import functional as F  # noqa: N812  # its usual name

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device) * scale
        return drawn.to(dtype).requires_grad_()

    def weight(*shape: int, scale: float = 1.0) -> Tensor:
        return draw(*shape, dtype=torch.float32, scale=scale)

    def targets() -> Tensor:
        return torch.randint(size.vocab, (tokens,), generator=generator, device=device)

    rows, hidden = (size.batch, size.length), size.hidden
    tokens, channels = size.batch * size.length, size.hidden // size.heads
    yield Call(
        "layer_norm",
        "",
        (draw(*rows, hidden), weight(hidden), weight(hidden), 1e-5),
        lambda x, gain, bias, epsilon: F.layer_norm(
            x, gain.shape, gain.to(x.dtype), bias.to(x.dtype), epsilon
        ),
    )
    yield Call(
        "rms_norm",
        "",
        (draw(*rows, hidden), weight(hidden), 1e-6),
        lambda x, gain, epsilon: F.rms_norm(x, gain.shape, gain.to(x.dtype), epsilon),
    )
    yield Call(
        "bias_gelu",
        "",
        (draw(*rows, size.ffn), weight(size.ffn)),
        lambda x, bias: F.gelu(x + bias.to(x.dtype), approximate="tanh"),
    )
    yield Call("swiglu", "", (draw(*rows, 2 * size.ffn),), _torch_swiglu)
    for dropout in (0.0, 0.1):
        yield Call(
            "bias_dropout_add",
            f"dropout {dropout:g}",
            (draw(*rows, hidden), weight(hidden), draw(*rows, hidden)),
            lambda x, bias, residual, *, dropout, training: (
                residual + F.dropout(x + bias.to(x.dtype), dropout, training=training)
            ),
            {"dropout": dropout, "training": True},
            random=dropout > 0,
        )
    scores = draw(min(size.batch, 4), size.heads, size.length, size.length)
    later = torch.ones(size.length, size.length, dtype=torch.bool, device=device).triu(1)
    yield Call("scaled_masked_softmax", "causal mask", (scores, later, 0.125), _torch_softmax)
    angles = torch.randn(size.length, channels // 2, generator=generator, device=device)
    packed = draw(*rows, 3, size.heads, channels).detach()
    heads = packed.permute(2, 0, 3, 1, 4)[0].requires_grad_()
    yield Call("rotary_embedding", "", (heads, angles.cos(), angles.sin()))
    yield Call("cross_entropy", "", (draw(tokens, size.vocab), targets()), _torch_cross_entropy)
    shares = torch.full((tokens,), 1 / tokens, device=device)
    vocabulary = draw(size.vocab, hidden, scale=0.02)
    yield Call(
        "linear_cross_entropy",
        "",
        (draw(tokens, hidden), vocabulary, targets(), shares),
        lambda x, table, target, share: (
            F.cross_entropy(F.linear(x, table).float(), target, reduction="none") @ share
        ),
    )


def _torch_swiglu(x: Tensor) -> Tensor:
    from torch.nn import functional

    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _torch_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x * scale).masked_fill(mask, float("-inf")).softmax(dim=-1)


def _torch_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), target, reduction="none")


def contenders(call: Call, *, compiled: bool) -> dict[str, Function]:
    """Return the functions that do a call, by the names in `CONTENDERS`."""
    import torch

    from lmcore.contract.op import reference
    from lmcore.contract.op.records import load_target
    from lmcore_triton.offers import op_impls

    targets = {impl.op: impl.load for impl in op_impls("")}
    plain, kernel = getattr(reference, call.op), load_target(targets[call.op])
    found = {"reference": plain, "triton": kernel}
    if call.torch is not None:
        found["torch"] = call.torch
    if compiled:
        torch.compiler.reset()
        for name, function in (("compiled", plain), ("triton, compiled", kernel)):
            found[name] = torch.compile(function, dynamic=False, fullgraph=True)
    return {name: found[name] for name in CONTENDERS if name in found}


def step_of(function: Function, call: Call) -> Callable[[], list[Tensor]]:
    """Return one forward and backward pass, which gives the output and the gradients."""
    import torch

    leaves = [one for one in call.arguments if isinstance(one, torch.Tensor) and one.requires_grad]
    with torch.no_grad():
        like = function(*call.arguments, **call.named)
    generator = torch.Generator(like.device).manual_seed(1)
    weights = torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)

    def step() -> list[Tensor]:
        out = function(*call.arguments, **call.named)
        return [out, *torch.autograd.grad(out, leaves, weights)]

    return step


def problem_of(found: Sequence[Tensor], wanted: Sequence[Tensor], call: Call) -> str | None:
    """Return how far a contender's results are from the reference's, if too far."""
    from lmcore.contract import OP_SPECS

    if call.random:  # other numbers are drawn: only the share that is kept could be compared
        return None
    (spec,) = (one for one in OP_SPECS if one.name == call.op)
    names = {str(one.dtype).removeprefix("torch.") for one in (*found, *wanted)}
    allowed = max(spec.tolerances[name].absolute for name in names)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        scale = max(other.detach().abs().max().item(), 1e-12)
        error = (one.detach().float() - other.detach().float()).abs().max().item() / scale
        if not error <= 2 * allowed:  # the reference is rounded too; NaN is off as well
            return f"result {place} is off by {error:.1e} of the largest"
    return None


class Clock:
    """Times calls on the device by events, or on the CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        """Take the buffer that empties the cache."""
        import torch

        self.device = device
        self.on_host = device.type == "cpu"
        count = 1 if self.on_host else _FLUSH_BYTES // 4
        self.buffer = torch.empty(count, dtype=torch.int32, device=device)

    def time(self, steps: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
        """Return milliseconds of each contender, one value a turn."""
        for step in steps.values():
            for _ in range(3):
                step()
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(turns):
            for name, value in self._turn(steps).items():
                taken[name].append(value)
        return taken

    def _turn(self, steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        import torch

        if self.on_host:
            return {name: _host_millis(step) for name, step in steps.items()}
        pairs = {}
        for name, step in steps.items():
            first, last = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            self.buffer.zero_()
            first.record()
            step()
            last.record()
            pairs[name] = first, last
        torch.accelerator.synchronize()
        return {name: first.elapsed_time(last) for name, (first, last) in pairs.items()}


def _host_millis(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def measure_call(call: Call, size: str, clock: Clock, *, turns: int, compiled: bool) -> Row:
    """Measure every contender of a call."""
    failed: dict[str, str] = {}
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    wanted: list[Tensor] | None = None
    for name, function in contenders(call, compiled=compiled).items():
        try:
            step = step_of(function, call)
            found = step()
        except Exception as error:  # noqa: BLE001  # the table says so, and the others go on
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        wanted = found if wanted is None else wanted
        problem = problem_of(found, wanted, call)
        if problem is None:
            steps[name] = step
        else:
            failed[name] = problem
    taken = clock.time(steps, turns)

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[name], taken[base], strict=True))

    others = [name for name in taken if name != "triton" and "triton" in taken]
    both = {"compiled", "triton, compiled"} <= taken.keys()
    return Row(
        call.op,
        call.label,
        size,
        {name: statistics.median(values) for name, values in taken.items()},
        {name: ratio(name, "triton") for name in others},
        ratio("compiled", "triton, compiled") if both else None,
        failed,
    )


def measure(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[str],
    *,
    ops: Sequence[str] = (),
    turns: int = 30,
    compiled: bool = True,
) -> Iterator[Row]:
    """Yield a row for each call.

    Args:
        device: Device to measure on.
        dtype: Dtype of activations.
        sizes: Names out of `SIZES`.
        ops: Names of ops; none: all.
        turns: Number of times that each contender is timed.
        compiled: True to compile, too.
    """
    clock = Clock(device)
    for name in sizes:
        for call in calls(SIZES[name], device, dtype):
            if not ops or call.op in ops:
                yield measure_call(call, name, clock, turns=turns, compiled=compiled)


def table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown: milliseconds, ratios to the kernel, and where it wins."""
    lines = [
        "| op | size | reference ms | triton ms | x reference | x torch | x compiled | wins |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        eager, inside = row.wins
        won = [word for word, true in (("eager", eager), ("compiled", inside)) if true]
        cells = [
            f"`{row.op}` {row.label}".strip(),
            row.size,
            *(_number(row.millis.get(name), 3) for name in ("reference", "triton")),
            *(_number(row.ratios.get(name), 2) for name in ("reference", "torch")),
            _number(row.compiled_ratio, 2),
            ", ".join(won) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        lines.extend(f"| `{row.op}`: {name} | {why} |" for name, why in row.failed.items())
    return "\n".join(lines)


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", help="torch's name; without it the accelerator that is there")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["124m", "1.7b"])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    sys.path.insert(0, str(Path(__file__).parent))  # here: others import this module
    from installed import TOY, check, parse

    asked = parse(parser, sizes=["tiny"], turns=1, no_compile=True)
    check(asked)
    import torch

    if asked.device is None and not torch.accelerator.is_available():
        sys.exit("no accelerator is here; `--device cpu` works where TRITON_INTERPRET=1 is set")
    if importlib.util.find_spec("triton") is None:
        sys.exit("Triton is not installed")
    device = torch.device(asked.device or torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    rows = []
    for row in measure(
        device,
        getattr(torch, asked.dtype),
        asked.sizes,
        ops=asked.ops,
        turns=asked.turns,
        compiled=not asked.no_compile,
    ):
        rows.append(row)
        print(f"{row.op} {row.label} {row.size}: {dict(row.millis)}", file=sys.stderr, flush=True)
    print(f"{device}, {asked.dtype}, torch {torch.__version__}; forward and backward\n")
    print(table(rows))
    if asked.json:
        note = {"note": TOY} if asked.toy else {}
        values = [dataclasses.asdict(row) | {"wins": row.wins} | note for row in rows]
        asked.json.write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
