"""One rank of an example of the library, for test_sim_library.py: EXAMPLE, OPTIONS, FILE.

The losses are written to FILE with the rank behind it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import lmcore

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/library"


def main(name: str, options: str, file: str) -> None:
    """Train as the example does, in float32."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with lmcore.start(precision="fp32") as rt:
        result = example.train(rt, **json.loads(options))
        losses = result[0] if isinstance(result, tuple) else result
        Path(f"{file}{rt.rank}").write_text(json.dumps([rt.device.type, losses]), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
