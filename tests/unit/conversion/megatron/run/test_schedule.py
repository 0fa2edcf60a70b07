"""Learning-rate schedules of Megatron: styles, the position, and schedules that lmcore lacks."""

from __future__ import annotations

from pathlib import Path

from megatron_files import SCHEDULE, content_of, run_progress
from megatron_models import GPT, MemoryState

from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.run.schedule import SavedSchedule, read_schedule


def test_cooldown_is_wsd(tmp_path: Path) -> None:
    """A constant rate with a cool-down is Megatron's WSD with the decay `minus_sqrt`."""
    schedule = SCHEDULE | {"style": "constant-cooldown"}
    state = MemoryState(GPT, optimizer=True, progress=run_progress(schedule=schedule))
    write_megatron(state, tmp_path, None)
    saved = content_of(tmp_path)["opt_param_scheduler"]
    assert (saved["lr_decay_style"], saved["num_steps"]) == ("WSD", 40)
    found = MegatronState(tmp_path).progress
    assert found is not None
    assert found.schedule == schedule


def test_schedules_that_lmcore_lacks() -> None:
    """Another style is named; a file without a schedule needs no note."""
    saved = {"max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 10}
    wsd = {"opt_param_scheduler": saved | {"lr_decay_style": "WSD"}}
    assert read_schedule(wsd, {"lr_wsd_decay_style": "linear"}) == SavedSchedule(
        note="its learning-rate schedule, `WSD`, is not read"
    )
    old = {"lr_scheduler": {"start_lr": 1.0, "min_lr": 0.0, "warmup_steps": 2, "decay_steps": 8}}
    old["lr_scheduler"]["decay_style"] = "linear"
    found = read_schedule(old, {})
    assert found.note is None
    assert found.values is not None
    assert [found.values[name] for name in ("style", "highest", "decay_samples")] == [
        *("linear", 1.0, 8)
    ]
    assert read_schedule({}, {}) == SavedSchedule()
    damaged = {"opt_param_scheduler": saved | {"lr_decay_style": "linear", "num_steps": -1}}
    assert "is not read" in str(read_schedule(damaged, {}).note)


def test_position_in_the_schedule(tmp_path: Path) -> None:
    """Megatron counts from the beginning of a schedule, without skipped updates, and both ways.

    After a restart at 10,000 samples, 2,000 of a decay over 5,000 are done: Megatron's rate
    is the one at 2,000.
    """
    schedule = SCHEDULE | {"start_samples": 10_000, "decay_samples": 5_000}
    state = MemoryState(
        GPT, optimizer=True, progress=run_progress(schedule=schedule, scheduled_samples=12_000)
    )
    write_megatron(state, tmp_path / "restarted", None)
    saved = content_of(tmp_path / "restarted")["opt_param_scheduler"]
    assert (saved["lr_decay_steps"], saved["num_steps"]) == (5_000, 2_000)
    found = MegatronState(tmp_path / "restarted").progress
    assert found is not None
    assert (found.consumed_samples, found.scheduled_samples) == (48, 2_000)
    assert found.schedule is not None
    assert "start_samples" not in found.schedule
    state.progress = run_progress(scheduled_samples=None)
    write_megatron(state, tmp_path / "unknown", None)
    assert content_of(tmp_path / "unknown")["opt_param_scheduler"]["num_steps"] == 48
