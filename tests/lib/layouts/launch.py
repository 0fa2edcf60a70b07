"""Launcher of ranks; arguments: DEVICE, number of processes, file of cases, folder, worker.

The worker is a script that gets the file and the folder; default: `worker.py`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lmcore.plugin import discover, select
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.launcher import launch

WORKER = Path(__file__).with_name("worker.py")


def main(device: str, num_processes: int, cases: str, out: str, worker: str = str(WORKER)) -> int:
    """Run the worker on all ranks and return the exit status."""
    os.environ["OMP_NUM_THREADS"] = "1"
    selection = select(discover(env={}), requested=device, env=dict(os.environ))
    env = {**os.environ, HANDED_DOWN: selection.to_json()}

    def be_a_rank() -> int:
        sys.argv = [worker, cases, out]
        runpy.run_path(worker, run_name="__main__")
        return 0

    command = [sys.executable, worker, cases, out]
    return launch(command, num_processes, env, function=be_a_rank, load=load)


def load() -> None:
    """Import the modules that forked ranks share with this process."""
    import torch  # noqa: F401

    import lmcore.train.run  # noqa: F401


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
