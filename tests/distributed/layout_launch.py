"""Start ranks: DEVICE, number of processes, file of cases, folder, and which worker.

Without the last it is `layout_worker.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lmcore.plugins import discover, select
from lmcore.plugins.selection import HANDED_DOWN
from lmcore.runtime.launch import launch

WORKER = Path(__file__).with_name("layout_worker.py")


def main(device: str, num_processes: int, cases: str, out: str, worker: str = str(WORKER)) -> int:
    """Return the exit status of the run."""
    selection = select(discover(env={}), requested=device, env=dict(os.environ))
    env = {**os.environ, HANDED_DOWN: selection.to_json(), "OMP_NUM_THREADS": "1"}
    return launch([sys.executable, worker, cases, out], num_processes, env)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
