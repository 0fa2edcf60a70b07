"""Place of this host among the nodes of a run whose launcher starts one process for each node.

Kubeflow's operators and `lmcore launch hostfile` do: that process starts the other processes of its
node. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.launchers import LAUNCHERS, Launcher, NodeVariables, first_value

__all__ = ["NodePlace", "node_place"]

_WORKER = "LOCAL_RANK"
"""Variable of a process that a launcher on its node has numbered."""


@dataclass(frozen=True)
class NodePlace:
    """One node of a run.

    Attributes:
        nodes: Number of nodes.
        rank: Rank of this node, from 0.
        per_node: Number of processes of each node; None: one for each device.
        address: Environment variables with the address of rank 0, as far as it is known.
    """

    nodes: int
    rank: int
    per_node: int | None
    address: Mapping[str, str]


def node_place(env: Mapping[str, str]) -> NodePlace | None:
    """Return the place of this node; None if no launcher started a process for each node.

    A process that has a local rank is one of a node's processes already.

    Raises:
        ConfigError: The numbers are missing or wrong.
    """
    if env.get(_WORKER, "").strip():
        return None
    for launcher in LAUNCHERS:
        variables = launcher.node
        if variables is not None and first_value(variables.nodes, env) is not None:
            return _place(launcher, variables, env)
    return None


def _place(launcher: Launcher, variables: NodeVariables, env: Mapping[str, str]) -> NodePlace:
    nodes = _number(launcher, variables.nodes, env, 1)
    rank = _number(launcher, variables.node_rank, env, 0)
    if rank >= nodes:
        raise ConfigError(
            f"the node has rank {rank} of {nodes}; ranks begin with 0",
            why=_shown((*variables.nodes, *variables.node_rank), env),
            hint=_hint(launcher),
        )
    count = first_value(variables.per_node, env)
    is_word = count is None or count.isalpha()
    per_node = None if is_word else _number(launcher, variables.per_node, env, 1)
    address = {
        name: value
        for name, names in (("MASTER_ADDR", variables.address), ("MASTER_PORT", variables.port))
        if (value := first_value(names, env)) is not None
    }
    return NodePlace(nodes, rank, per_node, address)


def _number(launcher: Launcher, names: tuple[str, ...], env: Mapping[str, str], least: int) -> int:
    text = first_value(names, env)
    digits = text is not None and text.isascii() and text.isdigit() and len(text) < 8
    if text is None or not digits or int(text) < least:
        raise ConfigError(
            f"{launcher.name}'s `{names[0]}` is not a number >= {least}",
            why=_shown(names, env) or f"`{names[0]}` is not set",
            hint=_hint(launcher),
        )
    return int(text)


def _shown(names: tuple[str, ...], env: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def _hint(launcher: Launcher) -> str:
    node = launcher.node
    assert node is not None
    first = ", ".join((node.nodes[0], node.node_rank[0], node.per_node[0]))
    return f"set {first} for each node, or unset {node.nodes[0]} to train on this host alone"
