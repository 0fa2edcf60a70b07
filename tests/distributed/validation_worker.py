"""One rank that validates in several layouts: a file of cases (JSON: name -> flags), and a folder.

For each case it writes the results of three validations: one that only rank 1 asks to stop, one
with NaN in the last layer, and one that ends by itself.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts.worker import Samples, of_case, plan_of

from lmcore.config.plan import RunPlan
from lmcore.data.loading.batch import CausalLMCollation
from lmcore.parallel.random_states import seed_everything
from lmcore.plugin import Selection, discover
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.launch.worker_protocol import end_with_launcher
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.engine import build_engine
from lmcore.train.validation import validate


def run(plan: RunPlan, runtime: Runtime) -> dict[str, Any]:
    """Validate three times."""
    seed_everything(plan.config.training.seed, runtime, plan.layout)
    samples = Samples(64, plan.config.model.seq_length)
    with build_engine(plan, runtime) as engine:
        parallel = engine.state.parallel
        parallel.initialize(plan.config.training.seed)
        whole = validate(
            parallel, samples, plan, runtime, collation=CausalLMCollation(), first_sample=0
        )
        assert whole is not None
        asked = itertools.count()
        stopped = validate(
            parallel,
            samples,
            plan,
            runtime,
            collation=CausalLMCollation(),
            first_sample=0,
            stop=lambda: next(asked) >= 2 and runtime.rank.rank == 1,
        )
        with torch.no_grad():
            for one in parallel.parameters:
                if one.name == "final_norm.weight":
                    one.tensor.fill_(math.nan)
        parallel.reshard()
        words = ""
        try:
            validate(
                parallel, samples, plan, runtime, collation=CausalLMCollation(), first_sample=0
            )
        except NonFiniteError as error:
            words = error.what
        return {"whole": whole.loss, "stopped": stopped is None, "asked": next(asked), "nan": words}


def main(cases: dict[str, str], out: Path) -> None:
    """Run all cases in one set of processes."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    torch.set_num_threads(1)
    plans = {name: plan_of(flags, place.world_size) for name, flags in cases.items()}
    first = next(iter(plans.values()))
    with (
        join_processes(place, timeout=60.0) as rendezvous,
        start_runtime(first.config, plugins, selection, place, rendezvous) as runtime,
    ):
        for name, plan in plans.items():
            found = run(plan, of_case(runtime, plan, plugins))
            (out / f"{name}.{place.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    end_with_launcher(os.environ)
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
