"""Nodes whose launcher starts one process for each."""

from __future__ import annotations

from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.node_place import NodePlace, node_place

ADDRESS = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OPERATOR = ADDRESS | {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "WORLD_SIZE": "16",
    "RANK": "1",
}
"""Variables of the second pod of a PyTorchJob, by training operator 1.9."""
TRAINER = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
"""The same by Kubeflow Trainer 2."""


@pytest.mark.parametrize(
    "env, expected",
    [
        (OPERATOR, NodePlace(2, 1, 8, ADDRESS)),
        (
            # An older operator counts pods; the manifest gives the other two.
            ADDRESS
            | {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"},
            NodePlace(2, 1, 4, ADDRESS),
        ),
        (
            TRAINER,
            NodePlace(2, 1, None, {"MASTER_ADDR": "job-node-0-0.job", "MASTER_PORT": "29500"}),
        ),
        ({}, None),
        (ADDRESS | {"RANK": "1", "WORLD_SIZE": "2"}, None),
        (OPERATOR | {"LOCAL_RANK": "0"}, None),
    ],
)
def test_places(env: dict[str, str], expected: Any) -> None:
    """The operator's variables give the node; a process with a local rank is no node's first."""
    assert node_place(env) == expected


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"PET_NNODES": "1:4"}, "`PET_NNODES` is not a number >= 1"),
        ({"PET_NNODES": "1"}, "rank 1 of 1"),
        ({"PET_NODE_RANK": "-1"}, "`PET_NODE_RANK` is not a number >= 0"),
        ({"PET_NODE_RANK": "", "RANK": ""}, "`PET_NODE_RANK` is not a number >= 0"),
        ({"PET_NPROC_PER_NODE": "0"}, "`PET_NPROC_PER_NODE` is not a number >= 1"),
        ({"PET_NPROC_PER_NODE": "2.5"}, "`PET_NPROC_PER_NODE` is not a number >= 1"),
    ],
)
def test_wrong_numbers(changed: dict[str, str], words: str) -> None:
    """A number that is missing or wrong is an error with the variable, never a run of one node."""
    with pytest.raises(ConfigError, match=words) as caught:
        node_place(OPERATOR | changed)
    assert "PET_NNODES" in str(caught.value.hint)
