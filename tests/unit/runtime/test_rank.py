"""The process's place."""

from __future__ import annotations

import pytest

from lmcore.errors import ConfigError
from lmcore.runtime.rank import RankInfo, rank_info


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "0"}])
def test_one_process(env: dict[str, str]) -> None:
    """Alone, or launched as one, a process is rank 0 of 1."""
    assert rank_info(env) == RankInfo(0, 0, 1, 1)
    assert rank_info(env).to_dict() == {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
    }


def test_several_processes() -> None:
    """A launcher's several processes are refused instead of training the same thing twice."""
    with pytest.raises(ConfigError, match="one of 2") as caught:
        rank_info({"WORLD_SIZE": "2", "RANK": "1"})
    assert caught.value.exit_status == 2
    assert "WORLD_SIZE" in str(caught.value.hint)
