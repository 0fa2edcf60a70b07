"""Kubernetes: a PyTorchJob of Kubeflow's training operator, with one pod for each node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.config.option import option
from lmcore.runtime.launch.job.command import JobCommand, header, preamble
from lmcore.runtime.launch.job.profile import JobProfile, seconds_of, variables_of

__all__ = ["KubernetesProfile", "render", "submit"]

_CONTAINER = "pytorch"
"""Name by which the operator finds the container."""
_PORT_NAME = "pytorchjob-port"
"""Name by which the operator finds the port of the rendezvous."""
_PORT = 23456
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_MAX_NAME = 50
"""Longest name of a job, to which the operator adds the replica for the names of pods."""
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[kMGTPE]|[KMGTPE]i|m)?", re.ASCII)
_SECRET_KEY = "secret"  # a name
_STOPPED = '"status": "(received SIG|received several signals)'


@dataclass(frozen=True, kw_only=True)
class KubernetesProfile(JobProfile):
    """Keys of a profile for Kubernetes."""

    container: str | None = option(None, "Image with lmcore.", metavar="IMAGE")
    mounts: tuple[str, ...] = option(
        (),
        "Mounts: a persistent volume claim, or a path of the node, and the path in the container.",
        metavar="SOURCE:/PATH",
    )
    directory: str | None = option(None, "Working directory in the container.", metavar="PATH")
    namespace: str | None = option(None, "Namespace of the job.", metavar="NAME")
    queue: str | None = option(None, "Local queue of Kueue.", metavar="NAME")
    devices_per_node: int | None = option(None, "Devices of each pod.", minimum=1, maximum=1024)
    device_resource: str | None = option(
        None,
        "Resource of the devices, as the cluster names it; default: as the device's plugin does.",
        metavar="NAME",
    )
    more_resources: tuple[str, ...] = option(
        (), "Further resources of each pod, such as network adapters.", metavar="NAME=NUMBER"
    )
    cpus: str | None = option(None, "CPU cores of each pod.", metavar="NUMBER")
    memory: str | None = option(None, "Memory of each pod, such as 200Gi.", metavar="SIZE")
    shared_memory: str = option("16Gi", "Size of /dev/shm.", metavar="SIZE")
    secret: str | None = option(
        None, "Kubernetes secret with the secret of the run in its key `secret`.", metavar="NAME"
    )
    pull_secret: str | None = option(
        None, "Kubernetes secret of the image's registry.", metavar="NAME"
    )
    node_selector: tuple[str, ...] = option((), "Labels of the nodes.", metavar="LABEL=VALUE")
    wall_time: str | None = option(None, "Longest time of the job.", metavar="[D-]HH:MM:SS")
    save_seconds: int = option(
        120,
        "Seconds that a pod gets to save a checkpoint when it is deleted.",
        minimum=1,
        maximum=86_400,
    )


def render(profile: KubernetesProfile, command: JobCommand) -> str:
    """Return the manifest.

    Raises:
        ConfigError: The profile contradicts itself, or lacks the image.
    """
    import yaml

    _check(profile)
    nodes = profile.nodes or 1
    restarts = "OnFailure" if profile.restarts else "Never"
    template = _template(profile, command)

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": restarts, "template": template}

    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": profile.restarts}
    if profile.wall_time is not None:
        policy["activeDeadlineSeconds"] = seconds_of(profile.wall_time, profile.save_seconds)
    replicas = {"Master": replica(1)} | ({"Worker": replica(nodes - 1)} if nodes > 1 else {})
    metadata: dict[str, Any] = {"name": profile.job_name}
    if profile.namespace is not None:
        metadata["namespace"] = profile.namespace
    if profile.queue is not None:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": profile.queue}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(profile.processes_per_node or 1),
            "runPolicy": policy,
            "pytorchReplicaSpecs": replicas,
        },
    }
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, _represent)
    text = yaml.dump(manifest, Dumper=dumper, sort_keys=False, width=100, allow_unicode=True)
    return "\n".join([*header("k8s", "kubectl apply -f FILE"), text])


def _represent(dumper: Any, text: str) -> Any:
    """Represent a text of several lines as a block."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _check(profile: KubernetesProfile) -> None:
    if profile.container is None:
        raise ConfigError(
            "a PyTorchJob needs a container image", hint="give `container: IMAGE` in the profile"
        )
    if not _LABEL.fullmatch(profile.job_name) or len(profile.job_name) > _MAX_NAME:
        raise ConfigError(
            f"`job_name`: `{profile.job_name}` is no name of a Kubernetes object",
            why=f"it has at most {_MAX_NAME} characters: lower case, digits, hyphens between them",
            hint="such as `job_name: gpt-1-7b`",
        )
    if (profile.devices_per_node is None) != (profile.device_resource is None):
        given = "devices_per_node" if profile.device_resource is None else "device_resource"
        other = "device_resource" if profile.device_resource is None else "devices_per_node"
        unnamed = ", which no installed plugin for the run's device names"
        raise ConfigError(
            f"the profile has `{given}` and no `{other}`",
            why="a pod requests a number of a named resource"
            f"{unnamed if profile.device_resource is None else ''}",
            hint=f"add `{other}`, or remove `{given}`",
        )
    devices, processes = profile.devices_per_node, profile.processes_per_node or 1
    if devices is not None and processes > devices:
        raise ConfigError(
            f"`processes_per_node` {processes} is more than `devices_per_node` {devices}",
            why="each process uses a device",
            hint="request as many devices as processes",
        )
    if (profile.nodes or 1) > 1 and profile.secret is None:
        raise ConfigError(
            "several nodes need `secret`",
            why="pods share no home directory, and processes without a common secret refuse each "
            "other",
            hint="`kubectl create secret generic lmcore "
            '--from-literal=secret="$(openssl rand -hex 32)"`, and `secret: lmcore`',
        )
    for key in ("cpus", "memory", "shared_memory"):
        value = getattr(profile, key)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(f"`{key}`: `{value}` is no quantity", hint="such as 8 or 200Gi")


def _template(profile: KubernetesProfile, command: JobCommand) -> dict[str, Any]:
    """Return the template of a pod."""
    resources = _resources(profile)
    volumes, mounts = _volumes(profile)
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": profile.container,
        "command": ["/bin/sh", "-c"],
        # The operator's environment is read by the script, not by Kubernetes: `$` is escaped.
        "args": ["\n".join(_script(profile, command)).replace("$", "$$") + "\n"],
        "env": _environment(profile),
        "ports": [{"name": _PORT_NAME, "containerPort": profile.master_port or _PORT}],
        "volumeMounts": mounts,
    }
    if profile.directory is not None:
        container["workingDir"] = profile.directory
    if resources:
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": profile.save_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    if profile.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": profile.pull_secret}]
    if profile.node_selector:
        spec["nodeSelector"] = _pairs(profile.node_selector, "node_selector")
    return {"spec": spec}


def _environment(profile: KubernetesProfile) -> list[dict[str, Any]]:
    # Older operators set RANK, the number of the pod, and no PET_ variables.
    own = {
        "PET_NNODES": str(profile.nodes or 1),
        "PET_NPROC_PER_NODE": str(profile.processes_per_node or 1),
    }
    given = {**own, **variables_of(profile)}
    given.pop("MASTER_PORT", None)  # the operator's, from the port of the container
    found: list[dict[str, Any]] = [
        {"name": name, "value": value.replace("$", "$$")} for name, value in given.items()
    ]
    if profile.secret is not None:
        reference = {"name": profile.secret, "key": _SECRET_KEY}
        found.append({"name": "LMCORE_SECRET", "valueFrom": {"secretKeyRef": reference}})
    return found


def _resources(profile: KubernetesProfile) -> dict[str, str]:
    found = {}
    if profile.cpus is not None:
        found["cpu"] = profile.cpus
    if profile.memory is not None:
        found["memory"] = profile.memory
    if profile.device_resource is not None:
        found[profile.device_resource] = str(profile.devices_per_node)
    return found | _pairs(profile.more_resources, "more_resources")


def _volumes(profile: KubernetesProfile) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and their mounts."""
    memory = {"medium": "Memory", "sizeLimit": profile.shared_memory}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108
    for number, mount in enumerate(profile.mounts):
        source, path, *options = mount.split(":")
        name = f"mount-{number}"
        if source.startswith("/"):
            volumes.append({"name": name, "hostPath": {"path": source}})
        elif all(map(_LABEL.fullmatch, source.split("."))):
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": source}})
        else:
            raise ConfigError(
                f"`mounts`: `{source}` is neither a path of a node nor a claim's name",
                hint="write `CLAIM:/PATH`, or `/PATH/OF/THE/NODE:/PATH`",
            )
        mounts.append(
            {"name": name, "mountPath": path} | ({"readOnly": True} if options == ["ro"] else {})
        )
    return volumes, mounts


def _pairs(texts: tuple[str, ...], key: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"`{key}`: `{text}` is not NAME=VALUE")
        found[name] = value
    return found


def _script(profile: KubernetesProfile, command: JobCommand) -> Iterator[str]:
    """Yield the lines of shell that a pod runs.

    A run that a signal has stopped ends with exit status 0: if it is to be continued, the pods end
    with another one.
    """
    yield "set -e"
    yield from (line for line in preamble(_without_variables(profile)))
    yield f"set -- {shlex.join(command.first())}"
    again = command.again()
    if again is not None:
        yield f"for checkpoint in {command.checkpoints}; do"
        yield f'    if [ -d "$checkpoint" ]; then set -- {shlex.join(again)}; fi'
        yield "done"
    if not profile.restarts or command.run_directory is None:
        yield 'exec "$@"'
        return
    summary = shlex.quote(f"{command.run_directory}/summary.json")
    yield '"$@" &'
    yield "run=$!"
    yield "signalled=0"
    yield """trap 'signalled=1; kill -TERM "$run"' TERM"""
    yield "while true; do"
    yield "    status=0"
    yield '    wait "$run" || status=$?'
    yield '    if [ "$signalled" -eq 0 ]; then break; fi'
    yield "    signalled=0"
    yield "done"
    yield 'if [ "$status" -ne 0 ]; then exit "$status"; fi'
    yield "sleep 5  # until rank 0 has written the summary"
    yield f"if grep -Eq {shlex.quote(_STOPPED)} {summary}; then exit 143; fi"


def _without_variables(profile: KubernetesProfile) -> JobProfile:
    """Return the lines of the profile alone; Kubernetes sets the variables."""
    return JobProfile(before=profile.before)


def submit(path: str, _profile: KubernetesProfile) -> Iterator[list[str]]:
    """Yield the command that creates the job."""
    yield ["kubectl", "apply", "-f", path]
