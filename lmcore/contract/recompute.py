"""`RecomputePolicy`: activations that backward recomputes, or fetches from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.contract.device import Device
    from lmcore.contract.rng import RngTracker

__all__ = [
    "Placement",
    "RecomputePolicy",
    "full_offload_policy",
    "full_policy",
    "none_policy",
    "offload_policy",
    "remembering",
    "selective_policy",
    "standard_recompute_policies",
]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class RecomputePolicy:
    """Method of running parts of a model that saves activation memory.

    A runner is called as ``run(call, *tensors, remember=remember)`` and returns what
    ``call(*tensors)`` returns.  A runner that repeats it in backward takes ``again = remember()``
    before the first call and makes the second one within ``again()``, with the random numbers and
    precision of the first.

    Attributes:
        name: value of `--recompute`.
        summary: the tensors that are kept and computed again, for help and docs.
        block: Runs a group of whole layers; None: they are called.
        attention: Runs the attention op of a layer; None: it is called.
        available: returns None, or the reason why the policy cannot be used here.
        plugin: Name of the plugin, "lmcore" for the core's own; filled in by the core.
    """

    name: str
    summary: str
    block: Callable[..., Any] | None = None
    attention: Callable[..., Any] | None = None
    available: Callable[[], str | None] = lambda: None
    plugin: str = ""

    def describe(self) -> dict[str, Any]:
        """Return the record's data as JSON values."""
        runs = {"layers": self.block, "attention": self.attention}
        return {
            "name": self.name,
            "summary": self.summary,
            "applies_to": [part for part, run in runs.items() if run is not None],
            "plugin": self.plugin,
        }

    def verify(self, device: Device) -> None:
        """Prove on a small block with dropout that it changes memory and nothing else.

        Raises:
            DeviceError: Loss, gradients or the random numbers drawn meanwhile differ.
        """
        for run in (self.block, self.attention):
            if run is not None:
                _verify(self.name, run, device)


@dataclass(frozen=True)
class Placement:
    """The layers that a policy for whole layers applies to, in the terms of Megatron's flags.

    Attributes:
        method: "uniform": all layers, in groups of `num_layers` that are kept and computed again
            together; "block": the first `num_layers` layers, one at a time.
        num_layers: number of layers of a group (uniform), or in all (block).
    """

    method: str = "uniform"
    num_layers: int = 1

    def groups(self, total: int) -> list[tuple[int, int, bool]]:
        """Return (first layer, layer behind the last, whether it is recomputed) of each group."""
        if self.method == "block":
            return [(layer, layer + 1, layer < self.num_layers) for layer in range(total)]
        size = self.num_layers
        return [(first, min(first + size, total), True) for first in range(0, total, size)]


def remembering(rng: RngTracker, context: Context) -> Callable[[], Context]:
    """Return what runners take as `remember`: it notes the random states of the moment.

    Args:
        rng: The tracker of all that a block may draw from.
        context: The precision's context, in which the forward pass runs.
    """

    def remember() -> Context:
        states = rng.snapshot()

        @contextmanager
        def again() -> Iterator[None]:
            with rng.restored(states), context():
                yield

        return again

    return remember


def none_policy() -> RecomputePolicy:
    """Return `none`: every activation is kept."""
    return RecomputePolicy("none", "keeps every activation")


def full_policy() -> RecomputePolicy:
    """Return `full`: only the inputs of layers are kept; dropout draws the same numbers again."""
    return RecomputePolicy("full", "keeps the input of each layer, computes the rest again", _again)


def selective_policy() -> RecomputePolicy:
    """Return `selective`: scores, softmax and dropout of attention are computed again.

    After Korthikanti et al., 2022 ("Reducing activation recomputation"), section 5.
    """
    summary = "keeps all but what attention computes from queries, keys and values"
    return RecomputePolicy("selective", summary, attention=_again)


def offload_policy(device: Device) -> RecomputePolicy:
    """Return `offload`: what layers keep waits in the host's memory; nothing is computed again."""
    return RecomputePolicy(
        "offload",
        "keeps activations in the host's memory until backward needs them",
        _offloading(device, _plainly),
        available=lambda: _no_offload(device),
    )


def full_offload_policy(device: Device) -> RecomputePolicy:
    """Return `full-offload`: the inputs of layers wait on the host, the rest is computed again."""
    return RecomputePolicy(
        "full-offload",
        "keeps the input of each layer in the host's memory, computes the rest again",
        _offloading(device, _again),
        available=lambda: _no_offload(device),
    )


def standard_recompute_policies(device: Device) -> list[RecomputePolicy]:
    """Return the core's policies; one that the device cannot run has the reason."""
    return [
        none_policy(),
        selective_policy(),
        full_policy(),
        offload_policy(device),
        full_offload_policy(device),
    ]


def _again(call: Callable[..., Any], *tensors: Tensor, remember: Callable[[], Context]) -> Any:
    from lmcore.contract.activation_saving import recompute

    return recompute(call, *tensors, remember=remember)


def _plainly(call: Callable[..., Any], *tensors: Tensor, **_remember: Any) -> Any:
    return call(*tensors)


def _no_offload(device: Device) -> str | None:
    if device.pin_memory is not None:
        return None
    return (
        f"device `{device.type}` has no pinned host memory to move tensors to "
        f"({device.missing['pin_memory']})"
    )


def _offloading(device: Device, run: Callable[..., Any]) -> Callable[..., Any]:
    memory: list[Any] = []  # made at the first use: this module loads no torch

    def offload(call: Callable[..., Any], *tensors: Tensor, remember: Callable[[], Context]) -> Any:
        from lmcore.contract.activation_saving import HostMemory

        if not memory:
            memory.append(HostMemory(device.torch_device, device.require("pin_memory")))
        with memory[0].keeping():
            return run(call, *tensors, remember=remember)

    return offload


def _verify(name: str, run: Callable[..., Any], device: Device) -> None:
    import torch

    rng = device.rng_tracker()
    for context, words in _contexts(device).items():
        remember = remembering(rng, context)
        with rng.preserved():
            start = rng.snapshot()
            plain = _trial(_plainly, remember, device, context)
            rng.restore(start)
            found = _trial(run, remember, device, context)
        for what, expected in plain.items():
            if not torch.equal(expected, found[what]):
                raise DeviceError(
                    f"recompute `{name}` is not exact on device `{device.type}`",
                    why=f"a block with dropout has other {what}{words} than without it: random "
                    "numbers or the precision are not restored where it is computed again, or not "
                    "left as they were",
                    hint="use `--recompute none`, or report this to the authors of its plugin",
                )


def _contexts(device: Device) -> dict[Context, str]:
    """Return the contexts in which a policy must be exact, each with its words for messages."""
    import torch

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    if "bfloat16" in device.dtypes and torch.amp.is_autocast_available(device.type):
        return {nullcontext: "", autocast: " under autocast to bfloat16"}
    return {nullcontext: ""}


def _trial(
    run: Callable[..., Any], remember: Callable[[], Context], device: Device, context: Context
) -> dict[str, Tensor]:
    """Return loss, gradients and the numbers drawn around backward, of two layers in a row."""
    import torch

    def layer(x_BH: Tensor) -> Tensor:
        inner_BH = torch.nn.functional.dropout(x_BH @ weight_HH, 0.5)
        return x_BH + torch.nn.functional.dropout(torch.tanh(inner_BH), 0.5)

    torch_device = device.torch_device
    weight_HH = torch.linspace(-1.0, 1.0, 256, device=torch_device).view(16, 16).requires_grad_()
    x_BH = torch.linspace(-2.0, 2.0, 256, device=torch_device).view(16, 16).requires_grad_()
    with context():  # the backward pass is outside, as in a run
        out_BH = run(layer, run(layer, x_BH, remember=remember), remember=remember)
    loss = out_BH.float().square().sum()
    before = torch.rand(8, device=torch_device)
    loss.backward()
    assert weight_HH.grad is not None
    assert x_BH.grad is not None
    return {
        "loss": loss.detach(),
        "gradients": torch.cat([weight_HH.grad, x_BH.grad]),
        "random numbers": torch.cat([before, torch.rand(8, device=torch_device)]),
    }
