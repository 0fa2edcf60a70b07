"""Supported versions of torch, and the capabilities that older ones among them lack.

The one place that compares versions of torch: other modules use a `TorchCapability`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata

from lmcore.base.errors import ConfigError

__all__ = [
    "ACCELERATOR_GRAPH",
    "ACCELERATOR_MEMORY",
    "ATTENTION_KERNELS",
    "ATTENTION_RESULTS",
    "CAPABILITIES",
    "CUSTOM_SHARD_COLLECTIVES",
    "EQUAL_FIRST_MESSAGES",
    "GLOO_AVERAGE",
    "GROUPED_CPU_ATTENTION",
    "MUON",
    "NEWEST",
    "OLDEST",
    "SCHEDULE_WITHOUT_OUTPUTS",
    "SPLIT_BACKWARD",
    "STAGE_GRADIENTS",
    "UNUSED_SHARDED_PARAMETERS",
    "TorchCapability",
]

OLDEST, NEWEST = "2.8", "2.15"
"""First and last tested version; newer ones are not refused."""


@dataclass(frozen=True)
class TorchCapability:
    """A capability of torch that a supported version introduced.

    Attributes:
        description: Noun phrase for messages.
        since: First version that has it.
        without: Behaviour of older versions, for the documentation.
    """

    description: str
    since: str
    without: str

    def __bool__(self) -> bool:
        """Return True if the installed torch has it."""
        return _release(_installed()) >= _release(self.since)

    @property
    def absence(self) -> str:
        """Reason for messages if the installed torch lacks it: "torch 2.8.0 has no ..."."""
        return f"torch {_installed()} has no {self.description}"

    def problem(self, setting: str, *, hint: str) -> ConfigError | None:
        """Return the error of a setting that needs it; None if the installed torch has it.

        Args:
            setting: Setting as the user gave it: "`--optimizer muon`".
            hint: An alternative.
        """
        if self:
            return None
        return ConfigError(
            f"{setting} needs torch {self.since} or newer",
            why=self.absence,
            hint=f"{hint}, or install a newer torch",
        )


ACCELERATOR_MEMORY = TorchCapability(
    "memory functions for all accelerators (`torch.accelerator.memory_allocated`, ...)",
    "2.9",
    "memory is read from torch's module of the device type; without one, it is not reported",
)
MUON = TorchCapability(
    "class `torch.optim.Muon`",
    "2.9",
    "`--optimizer muon` is refused",
)
CUSTOM_SHARD_COLLECTIVES = TorchCapability(
    "custom collectives in `fully_shard`",
    "2.9",
    "on devices that compute synchronously, rank times of ZeRO count waits for other ranks "
    "as computation",
)
GROUPED_CPU_ATTENTION = TorchCapability(
    "fused attention with grouped queries on the CPU",
    "2.9",
    "keys and values are repeated for each query head",
)
SCHEDULE_WITHOUT_OUTPUTS = TorchCapability(
    "pipeline step that returns no outputs",
    "2.10",
    "the last stage keeps the losses of a step twice",
)
EQUAL_FIRST_MESSAGES = TorchCapability(
    "messages of one size between pipeline stages before the first step",
    "2.10",
    "lmcore corrects those of 2.9; 2.8 sends none",
)
ATTENTION_KERNELS = TorchCapability(
    "registration of other kernels for its attention "
    "(`torch.nn.attention.activate_flash_attention_impl`)",
    "2.10",
    "`--ops attention=sdpa-fa3` and `sdpa-fa4` are refused",
)
GLOO_AVERAGE = TorchCapability(
    "average among the reductions of gloo",
    "2.11",
    "sums are divided by the number of ranks",
)
STAGE_GRADIENTS = TorchCapability(
    "shapes of gradients among the arguments of a pipeline stage",
    "2.12",
    "torch derives them from the shapes of inputs and outputs",
)
ACCELERATOR_GRAPH = TorchCapability(
    "graph class for all accelerators (`torch.accelerator.Graph`)",
    "2.12",
    "`--step-graph` needs a graph class of the plugin",
)
SPLIT_BACKWARD = TorchCapability(
    "backward pass in two parts for custom autograd functions",
    "2.13",
    "`--pipeline-schedule zero-bubble` and `zero-bubble-v` are refused",
)
UNUSED_SHARDED_PARAMETERS = TorchCapability(
    "reduction of gradients that some ranks lack in `fully_shard`",
    "2.13",
    "with `zero_stage` it is an error if the ranks use different parameters",
)
ATTENTION_RESULTS = TorchCapability(
    "registration of attention kernels with more than two results",
    "2.14",
    "`--ops attention=sdpa-fa4` is refused if its package is 4.0.0b19 or newer",
)

CAPABILITIES = (
    ACCELERATOR_MEMORY,
    MUON,
    CUSTOM_SHARD_COLLECTIVES,
    GROUPED_CPU_ATTENTION,
    SCHEDULE_WITHOUT_OUTPUTS,
    EQUAL_FIRST_MESSAGES,
    ATTENTION_KERNELS,
    GLOO_AVERAGE,
    STAGE_GRADIENTS,
    ACCELERATOR_GRAPH,
    SPLIT_BACKWARD,
    UNUSED_SHARDED_PARAMETERS,
    ATTENTION_RESULTS,
)
"""Capabilities that not every supported version has, in the order of their versions."""


@functools.cache
def _installed() -> str:
    return metadata.version("torch")


def _release(version: str) -> tuple[int, int]:
    """Return the first two numbers; a pre-release or vendor's build counts as its release."""
    major, minor, *_ = version.split("+", maxsplit=1)[0].split(".")
    digits = "".join(character for character in minor if character.isdigit())
    return int(major), int(digits)
