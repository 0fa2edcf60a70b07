"""One rank that trains a model of a family that only the tests have; see `layouts/worker.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts import worker
from layouts.mlp_model import replace_gpt

from lmcore.model.family import families
from lmcore.runtime.launch.worker_protocol import end_with_launcher

if __name__ == "__main__":
    end_with_launcher(os.environ)
    families()["GPT"] = replace_gpt()
    worker.main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
