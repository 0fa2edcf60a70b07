"""The process's place."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.rank import RankInfo, only_process, rank_info

SECOND_OF_FOUR = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("read", [rank_info, only_process])
@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
        {"RANK": "0"},
        {"WORLD_SIZE": " 1 ", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_one_process(env: dict[str, str], read) -> None:
    """Alone, or launched as one, a process is rank 0 of 1."""
    assert read(env) == RankInfo(0, 0, 1, 1)
    assert read(env).to_dict() == {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
    }


def test_several_processes() -> None:
    """The four variables that torchrun sets are the four numbers, and back."""
    place = rank_info(SECOND_OF_FOUR)
    assert place == RankInfo(rank=1, local_rank=1, world_size=4, local_world_size=2)
    assert place.to_env() == SECOND_OF_FOUR


@pytest.mark.parametrize(
    "change, what",
    [
        ({"RANK": ""}, "one of 4 and does not know which: `RANK` is not set"),
        ({"RANK": "", "LOCAL_RANK": ""}, "`RANK`, `LOCAL_RANK` are not set"),
        ({"LOCAL_WORLD_SIZE": ""}, "`LOCAL_WORLD_SIZE` is not set"),
        ({"WORLD_SIZE": "four"}, "`WORLD_SIZE=four` is not a number"),
        ({"WORLD_SIZE": "-1"}, "`WORLD_SIZE=-1` is not a number"),
        ({"RANK": "1.0"}, "`RANK=1.0` is not a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"),
        ({"RANK": "4"}, "RANK is 4 of WORLD_SIZE 4; ranks begin with 0"),
        ({"LOCAL_RANK": "2", "RANK": "2"}, "LOCAL_RANK is 2 of LOCAL_WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5 and WORLD_SIZE only 4"),
        ({"RANK": "0"}, "LOCAL_RANK is 1 and RANK only 0"),
        ({"WORLD_SIZE": ""}, "RANK is 1 of WORLD_SIZE 1"),
    ],
)
def test_variables_that_are_missing_or_contradict(change: dict[str, str], what: str) -> None:
    """Impossible variables are reported, with their values and a way out."""
    env = {**SECOND_OF_FOUR, **change}
    with pytest.raises(ConfigError) as caught:
        rank_info(env)
    assert what in caught.value.what
    assert caught.value.why
    assert "torchrun" in f"{caught.value.why} {caught.value.hint}"


def test_a_command_for_one_process() -> None:
    """A launcher's several processes are refused instead of training the same thing twice."""
    with pytest.raises(ConfigError, match="one of 2") as caught:
        only_process({"WORLD_SIZE": "2", "RANK": "1"})
    assert caught.value.exit_status == 2
    assert "WORLD_SIZE" in str(caught.value.hint)
