"""Requirements of a run on the manifest of the checkpoint from which it continues."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import Manifest
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.section.data import OLDER_RULES
from lmcore.train.resume.compare import changed_settings
from lmcore.train.resume.saved_run import check_saved_run, data_rules, part_of

META: dict[str, Any] = {
    "counters": {"iteration": 3, "consumed_samples": 12, "consumed_tokens": 192},
    "schedule": {
        "style": "cosine",
        "highest": 1e-3,
        "lowest": 0.0,
        "warmup_samples": 2.5,
        "decay_samples": 100,
    },
    "data_order": "1f",
    "layout": dataclasses.asdict(ParallelLayout(tensor=2, sequence=True)),
    "loss_scale": {},
    "validation": {
        "best_loss": 2.5,
        "best_step": 2,
        "reference_loss": 2.5,
        "without_improvement": 0,
    },
}


def manifest(meta: dict[str, Any]) -> Manifest:
    return Manifest(1, "1", "2", 3, 1, {}, meta, {}, {})


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the manifest's part with another value at *path*; `...` takes it out."""
    meta = copy.deepcopy(META)
    *way, last = path.split(".")
    place = meta
    for name in way:
        place = place[name]
    place[last] = value
    if value is ...:
        del place[last]
    return meta


@pytest.mark.parametrize("path", ["layout", "loss_scale", "layout.schedule", "validation"])
def test_what_older_versions_did_not_save(path: str) -> None:
    """It may be missing, and what a later version adds to counts does no harm."""
    check_saved_run(Path("c"), manifest(META))
    check_saved_run(Path("c"), manifest(changed(path, ...)))
    check_saved_run(Path("c"), manifest(changed("counters.skipped_iterations", 2)))


def test_precision_that_was_not_recorded(make_plan: Any) -> None:
    """The default of a run of an older version, which is not recorded, is no changed setting."""
    # The name of a plugin's policy is shown as it is.
    for saved, found in ((None, []), ("MyFP8", ["`precision` MyFP8 -> fp32"])):
        meta = {"config": {"config": {"accelerator": {"precision": saved}}}}
        changes = changed_settings(make_plan(""), manifest(meta), precision="fp32")
        assert [text for text in changes if "precision" in text] == found


def test_rules_of_the_data_order() -> None:
    """Older versions recorded none; rules that are not known are refused by name."""
    assert data_rules(Path("c"), manifest(META)) == OLDER_RULES
    assert data_rules(Path("c"), manifest({"config": {"config": {"data": 3}}})) == OLDER_RULES
    saved = {"split_rule": "megatron-core", "blend_rule": "megatron-core", "split": "1,1,1"}
    found = data_rules(Path("c"), manifest({"config": {"config": {"data": saved}}}))
    assert found == {"split_rule": "megatron-core", "blend_rule": "megatron-core"}
    for wrong in ("newer", ["legacy"], None):
        meta = {"config": {"config": {"data": saved | {"split_rule": wrong}}}}
        with pytest.raises(CheckpointError, match="no run can continue") as caught:
            data_rules(Path("c"), manifest(meta))
        assert f"`split_rule` is {wrong!r}" in str(caught.value.why)


@pytest.mark.parametrize(
    "path,value,named",
    [
        ("counters", ..., "counters.iteration"),
        ("counters", [1], "counters.consumed_samples"),
        ("counters.consumed_samples", ..., "counters.consumed_samples"),
        ("counters.iteration", "3", "counters.iteration"),
        ("counters.iteration", -1, "counters.iteration"),
        ("counters.iteration", True, "counters.iteration"),
        ("counters.scheduled_samples", 1.5, "counters.scheduled_samples"),
        ("schedule.highest", ..., "schedule.highest"),
        ("schedule.highest", "1", "schedule.highest"),
        ("schedule.decay_samples", float("inf"), "schedule.decay_samples"),
        ("schedule.momentum", 0.5, "schedule.momentum"),
        ("schedule.style", "exponential", "schedule.style"),
        ("data_order", ..., "data_order"),
        ("layout", "tensor 2", "layout"),
        ("layout.tensor", "2", "layout.tensor"),
        ("layout.sequence", 1, "layout.sequence"),
        ("loss_scale", 2.0, "loss_scale"),
        ("validation", [1], "validation"),
        ("validation.best_step", ..., "validation"),
        ("validation.best_step", 1.5, "validation.best_step"),
        ("validation.best_loss", "low", "validation.best_loss"),
        ("validation.more", 1, "validation"),
    ],
)
def test_what_is_missing_or_wrong_is_named(path: str, value: Any, named: str) -> None:
    """A manifest of another program, or a damaged one, is an error that says which part."""
    with pytest.raises(CheckpointError, match="no run can continue from checkpoint `c`") as caught:
        check_saved_run(Path("c"), manifest(changed(path, value)))
    assert f"`meta.{named}`" in str(caught.value.why)


def test_a_part_of_nothing_is_empty() -> None:
    """Any value may be in the path of keys."""
    assert part_of({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}
    assert part_of({"a": {"b": 1}}, "a", "b") == {}
    assert part_of({"a": []}, "a", "b") == {}


def test_a_run_with_a_schedule_of_its_own() -> None:
    """A checkpoint of another program has none; a wrong one is an error all the same."""
    without = manifest(changed("schedule", ...))
    check_saved_run(Path("c"), without, own_schedule=True)
    with pytest.raises(CheckpointError, match="has no learning-rate schedule") as caught:
        check_saved_run(Path("c"), without)
    assert "`--override-opt-param-scheduler`" in str(caught.value.hint)
    assert caught.value.exit_status == 2
    origin = {"converted_from": {"format": "DeepSpeed", "name": "gpt"}}
    with pytest.raises(CheckpointError, match="has no learning-rate schedule") as caught:
        check_saved_run(Path("c"), manifest(changed("schedule", ...) | origin))
    assert "from DeepSpeed, and `gpt` had none that is read" in str(caught.value.why)
    wrong = manifest(changed("schedule.highest", "x"))
    with pytest.raises(CheckpointError) as caught:
        check_saved_run(Path("c"), wrong, own_schedule=True)
    assert "--override" not in str(caught.value.hint)
    assert caught.value.exit_status == 1, "a damaged manifest is no wrong argument"


def test_weights_alone_cannot_continue() -> None:
    """A converted model has no state of a run: the error names its origin, not parts of meta."""
    meta = {"converted_from": {"format": "Hugging Face", "name": "gpt2"}}
    with pytest.raises(CheckpointError, match="no run can continue") as caught:
        check_saved_run(Path("runs/a b/checkpoints/iter_0000000"), manifest(meta))
    assert caught.value.exit_status == 2
    assert caught.value.why == (
        "it was converted from Hugging Face, and `gpt2` has weights alone, without step and "
        "optimizer"
    )
    assert "`lmcore train --load 'runs/a b' --use-checkpoint-args --finetune`" in str(
        caught.value.hint
    )
