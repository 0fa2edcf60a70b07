"""Cost of the plugin platform: a call of an op, a step of a run, the start of a process.

Calls: a kernel that does nothing, called directly, through the attribute that a module keeps of a
bound op, and in the styles of other frameworks, which look the kernel up or dispatch in each call.
The styles take turns, many calls each; a figure is the median over the turns of the difference
from the direct call in the same turn.

Steps: what `lmcore train` does in a step beside the same model, kernels and optimizer in a loop
written by hand, for a model so small that the difference is not lost in its products.

Start: discovery, choice, and building the op table, beside 0, 1 and 10 further plugins of each kind
(a device that is absent; thirteen kernels for whatever device there is), each time in a new
process.

    python benchmarks/abstraction.py
    python benchmarks/abstraction.py --json --only calls
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

Figures = dict[str, Any]

_ACCELERATOR: Any = None


def no_op(x: Any, weight: Any, bias: Any, epsilon: float) -> Any:  # noqa: ARG001
    """Take `layer_norm`'s arguments and do nothing."""
    return x


class _Backend:
    """A vendor's object with a method for each op."""

    def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        return no_op(x, weight, bias, epsilon)


def get_accelerator() -> Any:
    """Return the process's backend from a global, as peers do in each call."""
    global _ACCELERATOR  # noqa: PLW0603  # the style that is measured
    if _ACCELERATOR is None:
        _ACCELERATOR = _Backend()
    return _ACCELERATOR


def bound_module() -> Any:
    """Return a model's layer norm whose op was bound to `no_op` by the op table."""
    from lmcore.contract import OP_SPECS, OpImpl, OpTable
    from lmcore.families.layers.transformer import LayerNorm
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

    impl = OpImpl("layer_norm", "no-op", f"{no_op.__module__}:no_op", plugin="bench")
    shape = ModelShape(1, 8, 1, 8, 8, 8)
    module = LayerNorm(shape, OpBinding(OpTable(OP_SPECS, [impl]), "cpu", "float32"))
    assert module.op is sys.modules[no_op.__module__].no_op
    return module


def pluggy_caller() -> Callable[..., Any]:
    """Return a hook with one implementation."""
    import pluggy

    class Spec:
        @pluggy.HookspecMarker("bench")(firstresult=True)
        def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
            """Normalize."""

    class Plugin:
        @pluggy.HookimplMarker("bench")
        def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
            return no_op(x, weight, bias, epsilon)

    manager = pluggy.PluginManager("bench")
    manager.add_hookspecs(Spec)
    manager.register(Plugin())
    caller: Callable[..., Any] = manager.hook.layer_norm
    return caller


def custom_op() -> Callable[..., Any]:
    """Return an operator registered with torch, of a body that returns a tensor made before."""
    import torch

    made = torch.zeros(8)
    return torch.library.custom_op(
        "lmcore_bench::layer_norm",
        lambda *_: made,
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor bias, float epsilon) -> Tensor",
    )


def calls(turns: int, count: int) -> Figures:
    """Return nanoseconds of a direct call, and of each style beyond it."""
    import torch

    module, tensor = bound_module(), torch.zeros(8)
    names = {
        "module": module,
        "kernel": sys.modules[no_op.__module__].no_op,
        "get_accelerator": get_accelerator,
        "hook": pluggy_caller(),
        "operator": custom_op(),
        "registry": {("layer_norm", "cpu", torch.float32): no_op},
        "x": tensor,
        "float32": torch.float32,
    }
    local = "; ".join(f"{name} = _names[{name!r}]" for name in names)
    arguments = "(x, x, x, 1e-5)"
    styles = {
        "direct": f"kernel{arguments}",
        "bound op on a module": f"module.op{arguments}",
        "lookup in a registry": f"registry['layer_norm', x.device.type, x.dtype]{arguments}",
        "global getter, method": f"get_accelerator().layer_norm{arguments}",
        "pluggy hook": "hook(x=x, weight=x, bias=x, epsilon=1e-5)",
        "torch.library.custom_op": f"operator{arguments}",
    }
    timers = {
        style: timeit.Timer(text, setup=local, globals={"_names": names})
        for style, text in styles.items()
    }
    taken: dict[str, list[float]] = {style: [] for style in styles}
    with torch.no_grad():
        for turn in range(turns + 1):
            for style, timer in timers.items():
                # The slow styles need fewer calls for the same precision.
                number = count if style in {"direct", "bound op on a module"} else count // 20
                nanoseconds = timer.timeit(number) / number * 1e9
                if turn:
                    taken[style].append(nanoseconds)
    base = taken.pop("direct")
    found: Figures = {"direct call, ns": statistics.median(base)}
    for style, values in taken.items():
        pairs = zip(values, base, strict=True)
        found[f"{style}, ns more"] = statistics.median(one - other for one, other in pairs)
    return found


def steps(turns: int) -> Figures:
    """Return milliseconds of a step of a tiny model, through the framework and by hand."""
    from subjects import bare_step, lmcore_step
    from train_step import Shape

    shape = Shape(2, 32, 2, 32, 1, vocab_size=512)
    contenders = {
        "lmcore": lmcore_step(shape, compiled=False, threads=1),
        "by hand": bare_step(shape, compiled=False, threads=1),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 2):
        for name, step in contenders.items():
            began = time.perf_counter()
            for _ in range(20):
                step()
            if turn > 1:
                taken[name].append((time.perf_counter() - began) / 20 * 1e3)
    pairs = zip(taken["lmcore"], taken["by hand"], strict=True)
    return {
        "lmcore train, ms a step": statistics.median(taken["lmcore"]),
        "by hand, ms a step": statistics.median(taken["by hand"]),
        "the framework, ms a step": statistics.median(one - other for one, other in pairs),
    }


_DUMMY = """
from lmcore.contract import OP_SPECS, OpImpl, PluginInfo, Probe, ProbeState
from lmcore.hookspecs import hookimpl

@hookimpl
def lmcore_plugin_info():
    return PluginInfo("NAME", ">=1,<2")
"""
_DUMMY_DEVICE = """
@hookimpl
def lmcore_probe():
    return Probe("NAME", ProbeState.ABSENT, 0, evidence=("none of it",))
"""
_DUMMY_KERNELS = """
@hookimpl
def lmcore_op_impls():
    return [OpImpl(spec.name, "NAME", spec.reference, priority=1) for spec in OP_SPECS]
"""


def _install(folder: Path, name: str, source: str) -> None:
    """Lay out an installed distribution with one plugin."""
    (folder / f"plugin_{name}.py").write_text(source.replace("NAME", name), encoding="utf-8")
    info = folder / f"bench_{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: bench-{name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(
        f"[lmcore.plugins]\n{name} = plugin_{name}\n", encoding="utf-8"
    )


def starting() -> Figures:
    """Return milliseconds of each phase of this process's start; torch's import is left out."""
    began = time.perf_counter()
    from lmcore.plugin import build_op_table, create_device, discover, select

    imported = time.perf_counter()
    plugins = discover()
    found = time.perf_counter()
    selection = select(plugins)
    chosen = time.perf_counter()
    import torch

    assert torch.get_num_threads()
    from lmcore.config.section import Config

    device = create_device(plugins, selection, Config())
    before = time.perf_counter()
    table = build_op_table(plugins, selection, device)
    built = time.perf_counter()
    from lmcore.families.gpt.model import GPT
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

    with torch.device("meta"):
        ready = time.perf_counter()
        GPT(ModelShape(24, 64, 4, 256, 64, 512), OpBinding(table, "cpu", "float32"))
        first = time.perf_counter()
        GPT(ModelShape(24, 64, 4, 256, 64, 512), OpBinding(table, "cpu", "float32"))
        second = time.perf_counter()
    return {
        "import": (imported - began) * 1e3,
        "discover": (found - imported) * 1e3,
        "select": (chosen - found) * 1e3,
        "op table": (built - before) * 1e3,
        "bind": ((first - ready) - (second - first)) * 1e3,
    }


def starts(turns: int, counts: Sequence[int]) -> Figures:
    """Return the phases of a start beside so many further plugins."""
    rows: Figures = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(count):
                _install(Path(folder), f"device{number}", _DUMMY + _DUMMY_DEVICE)
                _install(Path(folder), f"kernels{number}", _DUMMY + _DUMMY_KERNELS)
            names = [f"{kind}{one}" for kind in ("device", "kernels") for one in range(count)]
            path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, "PYTHONPATH": path, "LMCORE_PLUGINS": ",".join(names)}
            taken = []
            for turn in range(turns + 1):
                command = [sys.executable, __file__, "--start"]
                ended = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
                if turn:  # the first one writes byte code
                    taken.append(json.loads(ended.stdout))
        rows[f"{count} devices, {count} x 13 kernels more"] = {
            phase: statistics.median(one[phase] for one in taken) for phase in taken[0]
        }
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["calls", "steps", "starts"])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    asked = parse(parser, turns=1, calls=2000)
    if asked.start:
        print(json.dumps(starting()))
        return
    check(asked)
    parts: dict[str, Callable[[], Figures]] = {
        "calls": lambda: calls(asked.turns, asked.calls),
        "steps": lambda: steps(asked.turns),
        "starts": lambda: (
            starts(1, (1,)) if asked.toy else starts(max(3, asked.turns // 5), (0, 1, 10))
        ),
    }
    found = {name: make() for name, make in parts.items() if asked.only in {None, name}}
    if asked.json:
        print(json.dumps(marked(found, asked), indent=2))
        return
    for name, figures in found.items():
        print(f"{name}:")
        for label, value in figures.items():
            shown = (
                ", ".join(f"{phase} {one:.1f}" for phase, one in value.items()) + " ms"
                if isinstance(value, dict)
                else f"{value:.2f}"
            )
            print(f"  {label:<40}{shown}")


if __name__ == "__main__":
    main()
