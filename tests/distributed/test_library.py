"""Sessions of two real processes: the same losses as one, and an end for every disagreement."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import warm

from lmcore.contract.torch_versions import UNUSED_SHARDED_PARAMETERS

WORKER = Path(__file__).with_name("library_worker.py")

pytestmark = pytest.mark.distributed
REFUSED_GRAPH = "a backward pass with `create_graph=True` through a sharded model"


def test_losses_are_those_of_one_process(start: Any, tmp_path: Path) -> None:
    """With each ZeRO stage; a checkpoint of stage 0 is continued by each."""
    ranks = start("train", lambda _: {"FOLDER": str(tmp_path)}, worker=WORKER)
    for ended in ranks:
        assert ended.status == 0, ended.errors
        (losses, norms), *stages = ended.printed
        assert len(stages) == 4
        for stage, found in enumerate(stages):
            torch.testing.assert_close(found["losses"], losses, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(found["norms"], norms, rtol=1e-5, atol=1e-6)
            assert (found["saved"], found["values"]) == ("iter_0000004", {"epoch": 0})
            assert found["after"][0] == pytest.approx(found["after"][1], rel=1e-6), stage


def test_weights_of_losses(start: Any) -> None:
    """Two ranks that accumulate update as one process does by the mean over all targets."""
    for ended in start("loss_weights", worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, *found = ended.printed
        assert len(found) == 8
        for stage in range(4):
            torch.testing.assert_close(found[2 * stage], plain, rtol=1e-5, atol=1e-6)
            assert "the weights of all losses of update 3 together are 0" in found[2 * stage + 1]


def test_gradients_of_some_ranks(start: Any) -> None:
    """Parameters that are frozen, unfrozen, or unused on a rank train as in one process.

    Older versions of torch cannot reduce sharded gradients that some ranks lack.
    """
    for ended in start("several_heads", worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, *stages = ended.printed
        assert len(stages) == 4
        for stage, found in enumerate(stages):
            if stage and not UNUSED_SHARDED_PARAMETERS:
                assert "only some ranks have a gradient of heads." in found
                assert "use torch 2.13 or newer, or no `zero_stage`" in found
            else:
                torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_parts_in_turn(start: Any) -> None:
    """Micro-batches of an update that use different parts, or models, train as in one process."""
    for ended in start("in_turn", worker=WORKER):
        assert ended.status == 0, ended.errors
        first, last, *stages, refused = ended.printed
        for found, expected in zip(stages, (first, last, first, first), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert "the last micro-batch of an update does not use a model" in refused


def test_layers_that_share_weights(start: Any, tmp_path: Path) -> None:
    """They are sharded with the rest of the model, and train as in one process."""
    for ended in start("sharing", lambda _: {"FOLDER": str(tmp_path)}, worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, *found = ended.printed
        assert len(found) == 4
        for weights in found:
            torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


def test_models_that_share_a_weight(start: Any, tmp_path: Path) -> None:
    """The gradients of both are averaged once; models that are sharded are refused."""
    for ended in start("shared_by_models", lambda _: {"FOLDER": str(tmp_path)}, worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, *found, refused = ended.printed
        for weights in found:
            torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)
        place = "`prepare`: `0.weight` of this Sequential is also `0.weight` of a Sequential"
        assert place in refused


def test_hooks_of_gradients(start: Any) -> None:
    """They are called for sharded parameters, too; gradients of their gradients are refused."""
    for ended in start("hooks", worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, first, refused, second, refused_again = ended.printed
        for weights in (first, second):
            torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)
        assert refused == refused_again == REFUSED_GRAPH


def test_optimizers_of_sharded_models(start: Any) -> None:
    """State of the constructor is sharded; optimizers and weights that torch fails at are named."""
    for ended in start("optimizers", worker=WORKER):
        assert ended.status == 0, ended.errors
        plain, weights, *refused = ended.printed
        torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)
        names = ("Adafactor", "LBFGS", "Rprop")
        assert refused == [
            *(f"`prepare`: {name} with `zero_stage`" for name in names),
            "`prepare`: `weight` is complex",
            "`prepare`: `weight` is a scalar",
            "`prepare`: `weight` is empty ([0, 2])",
            "`prepare`: `weight` is not contiguous (strides [1, 3])",
        ]


def test_averaged_weights(start: Any, tmp_path: Path) -> None:
    """A second prepared model holds moving averages of sharded weights."""
    for ended in start("averaged_weights", lambda _: {"FOLDER": str(tmp_path)}, worker=WORKER):
        assert ended.printed == ["equal"], ended.errors


def test_values_that_differ_between_ranks_are_those_of_rank_0(start: Any, tmp_path: Path) -> None:
    """Buffers, tensors and states of a checkpoint are one rank's; other shapes are an error."""
    for ended in start("own_values", lambda _: {"FOLDER": str(tmp_path)}, worker=WORKER):
        assert ended.status == 0, ended.errors
        ((kind, message),) = ended.printed
        assert kind == "RunError"
        assert 'tensor:\n       rank 0: ["float32", [2]]\n' in message
        assert 'rank 1: ["float32", [3]]' in message


def test_replicas_that_differ_are_not_saved(start: Any, tmp_path: Path) -> None:
    """Hyperparameters and weights that differ are named on all ranks."""
    folder = {"FOLDER": str(tmp_path / "run")}
    lr = "`lr` of group 0 of `optimizer`: rank 0: 0.5, rank 1: 1.5"
    for ended in start("drifted", lambda _: folder, worker=WORKER):
        assert ended.status == 0, ended.errors
        rates, weights = ended.printed
        assert "the ranks have different hyperparameters" in rates
        assert lr in rates
        assert "replicas differ: `model.head.weight`, on ranks 0-1" in weights
        assert "element [0, 0] is 3 in place of 2" in weights
        assert lr in weights


def test_mistakes_that_would_make_ranks_differ(start: Any) -> None:
    """Each is an error on every rank, with and without sharding."""
    for ended in start("misuse", worker=WORKER):
        assert ended.status == 0, ended.errors
        mistakes = [
            "was prepared in an earlier session",
            "on this rank only",
            "depends on no prepared model",
            "the gradient of `0.weight` is sparse",
            "`edges` is sparse",
            "`weight` is a DTensor",
            "module 0:",
        ]
        for found, words in zip(ended.printed, (mistakes * 3)[1:], strict=True):
            assert words in found


def test_values_are_exchanged(start: Any) -> None:
    """Reductions, gathers and broadcasts of tensors, numbers and JSON."""
    for rank, ended in enumerate(start("exchange", worker=WORKER)):
        assert ended.status == 0, ended.errors
        expected = {
            "mean": [0.5, 5.0],
            "max": 1,
            "gathered": [[0.0, 5.0], [1.0, 5.0]],
            "scalars": [0.0, 1.0],
            "json": [{"rank": 0}, {"rank": 1}],
            "sent": [1.0, 5.0],
            "text": "from 1",
        }
        assert ended.printed == ([expected, "once"] if rank == 0 else [expected])


@pytest.mark.parametrize("size", [2, 3])
def test_metrics_leave_out_repeated_samples(start: Any, size: int) -> None:
    """Each sample comes once, in order; tensors that do not fit together are named."""
    for ended in start("metrics", worker=WORKER, world_size=size):
        assert ended.printed == [
            [[i, i + 100, i % 2 == 0] for i in range(count)] for count in (4, 6, 7, 11)
        ], ended.errors
        assert ended.status == 1
        assert "differ in the tensors of `gather_for_metrics`" in ended.errors
        assert "shape of a sample:" in ended.errors


@pytest.mark.parametrize(
    "scenario, messages",
    [
        ("fail", ("rank 1 stopped the run", "the third batch is bad")),
        ("other_model", ("differ in the model that they prepare", "weight:")),
        ("uneven", ("rank 1 waits in `backward` at update 4", "after 3 updates of weights")),
        ("own_group", ("is initialized before `lmcore.start`", "init_process_group")),
    ],
)
def test_a_disagreement_ends_all(start: Any, scenario: str, messages: tuple[str, str]) -> None:
    """Every rank ends soon, and rank 0 says why."""
    ranks = start(scenario, worker=WORKER)
    assert all(ended.status for ended in ranks)
    assert all(ended.seconds < 30 for ended in ranks)
    for message in messages:
        assert message in ranks[0].errors


def test_a_session_that_one_rank_leaves_ends_all(start: Any) -> None:
    """Rank 0 learns it from its own wait, or from the report of rank 1 that looked first."""
    ranks = start("left", worker=WORKER)
    assert all(ended.status for ended in ranks)
    assert all(ended.seconds < 30 for ended in ranks)
    own = "rank 1 ended, and rank 0 waits for `barrier`"
    reported = "rank 1 has ended, and rank 0 waits for it\n"
    first = ranks[0 if own in ranks[0].errors else 1].errors
    assert own in first or reported in first
    assert "rank 1" in ranks[0].errors
    assert "`barrier`" in ranks[0].errors
    assert "rank == 0`" in first


SAME_TIME = "the ranks make different calls at the same time"


@pytest.mark.parametrize(
    "kind, messages",
    [
        ("shape", (SAME_TIME, "rank 1: `all_reduce` by mean of a tensor, float32 [5]")),
        ("dtype", (SAME_TIME, "rank 0: `all_gather` of a tensor, float32 [3]")),
        ("op", (SAME_TIME, "rank 0: `broadcast` from rank 0", "rank 1: `all_reduce` by max")),
        ("names", (SAME_TIME, "rank 1: `all_reduce` by mean of a number ['b']")),
        ("values", (SAME_TIME, "rank 0: `all_reduce` by mean of a number", "rank 1: `all_gather`")),
        ("barrier", ("rank 1 is in `barrier`, and rank 0 waits for it in another call",)),
        ("tensor", ("rank 0 is in `all_reduce` by mean", "rank 1 waits for it in another call")),
        ("backward", ("rank 0 is in the objects of `save`", "rank 1 waits for it", "group data")),
        (
            "uncounted",
            ("rank 0 is in the objects of `save`", "rank 1: waits in `backward` at update 1"),
        ),
        ("saved", ("the batches of a loader", "the objects of `save`")),
        ("destroyed", ("torch's process group is gone",)),
        ("break, no length", ("both went on",)),
        ("own backward", ("on this rank only", "would not be averaged", "rt.backward(loss)")),
        ("optimizer", ("differ in the optimizer that they prepare", "lr of group 0:")),
        ("sharded since", ("no parameter of AdamW has a gradient", "moved or sharded")),
        ("break", ("rank 1 is in the batches of a loader, and rank 0 waits", "group data")),
    ],
)
def test_calls_that_differ_are_named(start: Any, kind: str, messages: tuple[str, ...]) -> None:
    """Soon, on every rank, with the line of the script and the ranks."""
    for ended in start("calls", lambda _: {"CALLS": kind}, worker=WORKER, timeout=50.0):
        assert ended.status == 1
        assert ended.printed == []
        assert ended.seconds < 30
        for message in messages:
            assert message in ended.errors
        assert "Traceback" not in ended.errors
        (line,) = [line for line in ended.errors.splitlines() if line.startswith("at: ")]
        assert any(word in line for word in ("rt.", "again.", "raise", ".backward()"))


def test_a_rank_may_work_alone(start: Any) -> None:
    """The others wait at the end of the block, longer than the timeout of an exchange."""
    for ended in start("late", worker=WORKER, timeout=2.5):
        assert (ended.status, ended.printed) == (0, ["ended"]), ended.errors


@pytest.mark.parametrize("way", ["rank 0's store", "launcher's store"])
def test_sessions_follow_each_other(start: Any, way: str) -> None:
    """Each session has its own values and failures, whichever process has the store."""
    if way == "rank 0's store":
        outputs = [ended.printed for ended in start("again", worker=WORKER)]
    else:
        command = [sys.executable, "-m", "lmcore.cli.main", "run", "--nproc-per-node", "2"]
        command += ["--device", "cpu", "--output", "rank0", str(WORKER), "again", "20"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}
        done = warm.run(command, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        outputs = [[json.loads(line) for line in done.stdout.splitlines()]]
    for printed in outputs:
        assert printed == [[[number, 0], [number, 1]] for number in range(3)]
