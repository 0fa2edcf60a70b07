"""How many processes train together, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class ParallelSection:
    """Processes of a run; each has a device, and all hold the whole model."""

    nproc_per_node: int | None = option(
        None,
        "Processes to start on this host; default: one for each device. Under a launcher, which "
        "starts them itself, it may only repeat the launcher's number.",
        minimum=1,
        maximum=4096,
    )
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that a process waits for the others before the run fails.", above=0
    )
