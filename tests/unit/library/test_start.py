"""Tests of what `lmcore.start` loads and leaves behind, each in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

_HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    *("numpy.random", "packaging", "psutil", "pydantic", "regex", "rich", "sympy", "yaml"),
    "lmcore.checkpoint",
    "lmcore.cli",
    "lmcore.config.file",
    "lmcore.config.foreign",
    "lmcore.config.load",
    "lmcore.config.options",
    *(f"lmcore.config.section.{name}" for name in ("data", "logging", "model", "optimizer")),
    "lmcore.config.tokenizer",
    "lmcore.data.dataset",
    "lmcore.data.loading.batch",
    "lmcore.library.ending",
    "lmcore.library.module_kernels",
    "lmcore.library.op_calls",
    "lmcore.library.saved_state",
    "lmcore.families",
    "lmcore.model",
    "lmcore.parallel.gradient_buckets",
    "lmcore.parallel.tensor_parallel",
    "lmcore.plugin.isolation",
    "lmcore.runtime.process.consistency",
    "lmcore.runtime.process.group",
    "lmcore.runtime.process.join",
    "lmcore.runtime.process.rendezvous",
    "lmcore.runtime.store",
    "lmcore.train",
)
"""Modules that one process without a checkpoint does not need."""

_LARGEST_NUMBER = 105
"""Bound of the number of lmcore's modules: each takes half a millisecond or more."""

_LOADED = """
import json, sys, torch
before = set(sys.modules)
import lmcore
with lmcore.start(device="cpu", precision="fp32") as rt:
    model = rt.prepare(torch.nn.Linear(4, 4))
    for batch in rt.loader([torch.ones(2, 4)]):
        rt.backward(model(batch).sum())
print(json.dumps(sorted(set(sys.modules) - before)))
"""

_FROZEN = """
import gc, json, torch, lmcore, lmcore.library.start
{before}
counts = []
discover = lmcore.library.start.discover
def discovered(**arguments):
    counts.append(gc.get_freeze_count() > 0)
    return discover(**arguments)
lmcore.library.start.discover = discovered
for _ in range(2):
    rt = lmcore.start(device="cpu", precision="fp32")
    counts.append(gc.get_freeze_count() > 0)
    rt.close()
    counts.append(gc.get_freeze_count() > 0)
print(json.dumps([counts, gc.isenabled()]))
"""


def run(code: str) -> Any:
    """Return the JSON that a program prints in a fresh interpreter with the CPU's plugin only."""
    env = {**os.environ, "LMCORE_PLUGINS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_process_loads_only_what_it_needs() -> None:
    loaded = run(_LOADED)
    heavy = [name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in _HEAVY)]
    assert heavy == []
    own = [name for name in loaded if name.split(".")[0] == "lmcore"]
    assert len(own) <= _LARGEST_NUMBER, own


def test_modules_that_are_left_out_exist() -> None:
    """A renamed module does not leave the test above by accident."""
    own = [name for name in _HEAVY if name.startswith("lmcore.")]
    code = f"import importlib.util, json; print(json.dumps([n for n in {own!r} "
    code += "if importlib.util.find_spec(n) is None]))"
    assert run(code) == []


@pytest.mark.parametrize(
    "before, counts",
    [
        ("", [True, True, *[False] * 4]),  # only the first session of a process
        ("gc.disable()", [False] * 6),
        ("gc.freeze()", [True] * 6),
        ("import sys; sys.ps1 = '>>> '", [False] * 6),
    ],
    ids=["script", "disabled by the program", "frozen by the program", "interactive"],
)
def test_older_objects_are_frozen_during_the_first_session(before: str, counts: list[bool]) -> None:
    """They are, before plugins are discovered; afterwards all is as the program has set it."""
    assert run(_FROZEN.format(before=before)) == [counts, "disable" not in before]


def test_nothing_stays_frozen_if_the_start_fails() -> None:
    code = """
import gc, json, lmcore
try:
    lmcore.start(device="no_such_device")
except lmcore.LmcoreError as error:
    print(json.dumps(["no_such_device" in str(error), gc.get_freeze_count()]))
"""
    assert run(code) == [True, 0]
