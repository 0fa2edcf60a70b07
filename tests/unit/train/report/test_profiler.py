"""`--profile`: which steps are recorded, by which process, and what the trace holds."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from lmcore.config.section import ProfileSection
from lmcore.runtime.profiler_range import no_range
from lmcore.train.report.profiler import Profile, activities_of


def run(
    asked: ProfileSection, directory: Path, *, first: int = 0, last: int = 8, rank: int = 0
) -> list[str]:
    """Take steps with a profile; return what was shown."""
    said: list[str] = []
    with Profile(asked, directory, device_type="cpu", rank=rank, say=said.append) as profile:
        for done in range(first, last):
            profile.on_step(done)
            for name in ("forward", "backward"):
                with profile.profiler_range(name):
                    torch.ones(32, 32) @ torch.full((32, 32), float(done))
        profile.on_step(last, ends=True)
    return said


def traces(directory: Path) -> dict[str, Counter[str]]:
    """Return the number of events by name in each trace."""
    found = {}
    for path in sorted(directory.iterdir()):
        content = json.loads(gzip.decompress(path.read_bytes()))
        found[path.name] = Counter(event["name"] for event in content["traceEvents"])
    return found


def test_steps(tmp_path: Path) -> None:
    """The steps after the start up to the end are in the trace, and no others."""
    said = run(ProfileSection(profile=True, profile_step_start=3, profile_step_end=6), tmp_path)
    ((name, events),) = traces(tmp_path).items()
    assert name == "steps_4-6.rank0.pt.trace.json.gz"
    assert (events["forward"], events["backward"], events["aten::mm"]) == (3, 3, 6)
    assert said[0] == f"profile   steps 4 to 6: {tmp_path / name}"
    assert "host, ms a step: forward " in said[1]
    assert any("aten::mm" in line for line in said)


@pytest.mark.parametrize(
    "first, last, start, end, name, steps",
    [
        (0, 8, 0, 2, "steps_1-2", 2),
        (0, 8, 1, 2, "steps_2-2", 1),
        (4, 8, 2, 6, "steps_5-6", 2),
        (0, 8, 6, 8, "steps_7-8", 2),
        (0, 5, 3, 9, "steps_4-5", 2),
    ],
)
def test_at_the_edges(
    tmp_path: Path, first: int, last: int, start: int, end: int, name: str, steps: int
) -> None:
    """From the first step, after a resume, up to the last one, cut short by the run's end."""
    asked = ProfileSection(profile=True, profile_step_start=start, profile_step_end=end)
    run(asked, tmp_path, first=first, last=last)
    ((found, events),) = traces(tmp_path).items()
    assert found.startswith(name)
    assert events["forward"] == steps


@pytest.mark.parametrize(
    "first, last, wanted",
    [
        (6, 8, "the run continues after step 6"),
        (0, 2, "the run ended before step 4"),
        (0, 3, "the run ended before step 4"),
    ],
)
def test_says_that_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, last: int, wanted: str
) -> None:
    """A run that has none of the steps says so, and leaves no trace."""
    asked = ProfileSection(profile=True, profile_step_start=3, profile_step_end=5)
    with caplog.at_level(logging.WARNING):
        assert run(asked, tmp_path, first=first, last=last) == []
    assert [record.getMessage() for record in caplog.records] == [f"nothing is profiled: {wanted}"]
    assert list(tmp_path.iterdir()) == []


def test_ranks(tmp_path: Path) -> None:
    """The processes that are asked to record do, each its own file."""
    asked = ProfileSection(profile=True, profile_step_start=1, profile_step_end=2)
    run(asked, tmp_path, rank=1)
    assert list(tmp_path.iterdir()) == []
    asked = ProfileSection(
        profile=True, profile_step_start=1, profile_step_end=2, profile_ranks=(0, 1)
    )
    run(asked, tmp_path, rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["steps_2-2.rank1.pt.trace.json.gz"]


def test_more_of_each_op(tmp_path: Path) -> None:
    """Shapes, allocations and source lines are in the trace where they are asked for."""
    shown = {}
    for wanted in (False, True):
        asked = ProfileSection(
            profile=True,
            profile_step_start=1,
            profile_step_end=2,
            profile_shapes=wanted,
            profile_memory=wanted,
            profile_stacks=wanted,
        )
        folder = tmp_path / str(wanted)
        run(asked, folder)
        (path,) = folder.iterdir()
        text = gzip.decompress(path.read_bytes()).decode()
        shown[wanted] = [word in text for word in ("Input Dims", "[memory]", Path(__file__).name)]
    assert shown == {False: [False] * 3, True: [True] * 3}


def test_off_costs_nothing(tmp_path: Path) -> None:
    """Without a profile, and outside of its steps, a name is one context that does nothing."""
    off = Profile(ProfileSection(), tmp_path, device_type="cpu")
    on = Profile(ProfileSection(profile=True), tmp_path, device_type="cpu")
    for profile in (off, on):
        with profile:
            profile.on_step(0)
            assert profile.profiler_range("forward") is no_range("backward")
    assert list(tmp_path.iterdir()) == []


def test_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A place that refuses loses the trace, with a warning, and not the run."""
    (tmp_path / "profile").write_text("a file")
    asked = ProfileSection(profile=True, profile_step_start=1, profile_step_end=2)
    assert run(asked, tmp_path / "profile") == []
    (record,) = caplog.records
    assert "the profile cannot be written" in record.getMessage()


def test_ends_with_an_error(tmp_path: Path) -> None:
    """The steps that a failing run has taken are written."""
    asked = ProfileSection(profile=True, profile_step_start=1, profile_step_end=6)

    def fail() -> None:
        with Profile(asked, tmp_path, device_type="cpu") as profile:
            for done in range(6):
                profile.on_step(done)
                with profile.profiler_range("forward"):
                    _ = 1 / (3 - done)

    with pytest.raises(ZeroDivisionError):
        fail()
    ((name, events),) = traces(tmp_path).items()
    assert name.startswith("steps_2-3")
    assert events["forward"] == 3  # the failing one too


def test_activities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is recorded, and the device where torch can, by torch's own word for its type."""
    every = set(ProfilerActivity.__members__.values())
    monkeypatch.setattr("torch.profiler.supported_activities", lambda: every)
    assert activities_of("cpu") == [ProfilerActivity.CPU]
    assert activities_of("mtia") == [ProfilerActivity.CPU, ProfilerActivity.MTIA]
    assert activities_of("unheard_of") == [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    monkeypatch.setattr("torch.profiler.supported_activities", lambda: {ProfilerActivity.CPU})
    assert activities_of("mtia") == [ProfilerActivity.CPU]


class TestTable:
    """The lines at the end of a profile."""

    @staticmethod
    def event(name: str, time: float, *, device: str = "CPU", named: bool = False) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(
            key=name,
            count=2,
            cpu_time_total=time,
            self_cpu_time_total=time,
            device_time_total=time,
            self_device_time_total=time,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=named,
        )

    def test_host(self) -> None:
        """Without a device the host's ops are listed, by their own time; ranges are not ops."""
        from lmcore.train.report.profiler import range_lines, top_ops

        averages = [
            self.event("forward", 9e3, named=True),
            self.event("ProfilerStep#1", 20e3),
            self.event("aten::mm", 6e3),
            self.event("x" * 99, 2e3),
        ]
        assert range_lines(averages, 2) == ["          host, ms a step: forward 4.5"]
        title, first, second = (line.split() for line in top_ops(averages))
        assert title == ["op", "on", "the", "host", "calls", "ms", "share"]
        assert first == ["aten::mm", "2", "6.00", "75.0%"]
        assert (len(second[0]), second[-1]) == (48, "25.0%")
        assert len(top_ops(averages, 1)) == 2
        assert top_ops([]) == []

    def test_device(self) -> None:
        """With a device its kernels are listed, and the ranges as they were there."""
        from lmcore.train.report.profiler import range_lines, top_ops

        averages = [
            self.event("forward", 1e3, named=True),
            self.event("aten::mm", 6e3),
            self.event("forward", 8e3, device="ACC", named=True),
            self.event("gemm", 3e3, device="ACC"),
            self.event("norm", 1e3, device="ACC"),
        ]
        assert range_lines(averages, 1) == [
            "          host, ms a step: forward 1.0",
            "          device, ms a step: forward 8.0",
        ]
        assert [line.split()[0] for line in top_ops(averages)] == ["kernel", "gemm", "norm"]
        assert top_ops(averages)[1].split()[-1] == "75.0%"
