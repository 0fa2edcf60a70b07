"""One rank that trains on samples with masked targets; see `layouts/worker.py`.

The results also have the validation loss of the initial weights and, of one process, the first
step computed by plain torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts import worker

from lmcore.config.plan import RunPlan
from lmcore.data.loading.batch import CausalLMCollation
from lmcore.parallel.random_states import seed_everything
from lmcore.runtime.launch.worker_protocol import end_with_launcher
from lmcore.runtime.runtime import Runtime
from lmcore.train.engine import build_engine
from lmcore.train.state import TrainState
from lmcore.train.validation import validate

END = worker.END


class MaskedSamples(worker.Samples):
    """Samples whose targets are masked in different numbers.

    In every eight, one has no valid target, one none in the first and last quarter, and one none in
    the two middle quarters: a part of a context-parallel group has none there.
    """

    def __init__(self, count: int, length: int) -> None:
        """Draw the samples, and mask."""
        super().__init__(count, length)
        quarter = length // 4
        self.tokens[::8] = END
        self.tokens[1::8, :quarter] = self.tokens[1::8, 3 * quarter :] = END
        self.tokens[2::8, quarter : 3 * quarter] = END


def by_plain_torch(state: TrainState, tokens: torch.Tensor) -> dict[str, Any]:
    """Return loss, gradient norm and gradients: summed losses of valid targets / their number."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = state.model.logits(state.model(inputs))[..., : worker.VOCABULARY]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    valid = inputs.flatten() != END
    loss = losses[valid].sum() / valid.sum()
    named = dict(state.model.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    return {"loss": loss.item(), "norm": norm.item(), "grads": grads}


def run(plan: RunPlan, runtime: Runtime, **options: Any) -> dict[str, Any]:
    """Train, and do what the module says."""
    found = train(plan, runtime, **options)
    count = worker.DRAWN_STEPS * plan.global_batch_size  # as many as in training: the same ones
    samples = MaskedSamples(count, plan.config.model.seq_length)
    seed_everything(plan.config.training.seed, runtime, plan.layout)
    with build_engine(plan, runtime) as engine:
        parallel = engine.state.parallel
        parallel.initialize(plan.config.training.seed)
        collation = CausalLMCollation(masks=worker.masks_of(plan))
        valid = validate(parallel, samples, plan, runtime, collation=collation, first_sample=0)
        assert valid is not None
        found["valid"] = valid.loss
        if runtime.processes is None or runtime.rank.world_size == 1:
            tokens, batch = torch.from_numpy(samples.tokens), plan.global_batch_size
            with runtime.precision.context():
                found["plain"] = by_plain_torch(engine.state, tokens[:batch])
                found["plain_valid"] = by_plain_torch(engine.state, tokens[: 2 * batch])["loss"]
    return found


train = worker.run

if __name__ == "__main__":
    end_with_launcher(os.environ)
    worker.Samples, worker.run = MaskedSamples, run  # type: ignore[misc]
    worker.main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
