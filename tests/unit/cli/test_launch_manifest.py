"""Manifests of `lmcore launch k8s` against the schemas of Kubernetes and Kubeflow's own classes.

`tox -e manifests` installs both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcore.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "aws_slurm_kubernetes"
FEW = ("--container", "image")
ALL = (
    "--profile",
    str(EXAMPLE / "kubernetes.yaml"),
    "--queue",
    "team",
    "--pull-secret",
    "registry",
)
ALL += ("--wall-time", "1-00:00:00", "--mounts", "/local:/scratch:ro")
VERSIONS = ("1.28", "1.37")
"""An old and the newest version of Kubernetes with a schema in the package."""


def manifest(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `lmcore launch k8s` prints, as data."""
    assert (
        main(["launch", "k8s", *flags, "train", "--save", "runs/$(A)", "--train-iters", "3"]) == 0
    )
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


@pytest.mark.peer
@pytest.mark.parametrize("flags", [FEW, ALL], ids=["few", "all"])
def test_pods_are_valid(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The pods fit Kubernetes' schema, which refuses unknown fields and wrong types."""
    package = pytest.importorskip("kubernetes_validate", reason="`tox -e manifests` installs it")
    replicas = manifest(flags, capsys)["spec"]["pytorchReplicaSpecs"]
    for version in VERSIONS:
        for replica in replicas.values():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
            package.validate(pod | replica["template"], version, strict=True)
        wrong = pod | {"spec": replica["template"]["spec"] | {"volume": []}}
        with pytest.raises(package.ValidationError):
            package.validate(wrong, version, strict=True)


@pytest.mark.peer
@pytest.mark.parametrize("flags", [FEW, ALL], ids=["few", "all"])
def test_jobs_are_valid(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The operator's classes have every field, and accept its value."""
    models = pytest.importorskip(
        "kubeflow.training.models", reason="`tox -e manifests` installs kubeflow-training"
    )
    job = manifest(flags, capsys)
    spec = job["spec"]
    made = {
        name: filled(models.KubeflowOrgV1ReplicaSpec, replica)
        for name, replica in spec["pytorchReplicaSpecs"].items()
    }
    policy = filled(models.KubeflowOrgV1RunPolicy, spec["runPolicy"])
    inner = {**spec, "pytorchReplicaSpecs": made, "runPolicy": policy}
    whole = filled(
        models.KubeflowOrgV1PyTorchJob,
        {**job, "spec": filled(models.KubeflowOrgV1PyTorchJobSpec, inner)},
    )
    assert (whole.api_version, whole.kind) == ("kubeflow.org/v1", "PyTorchJob")


def filled(model: Any, values: dict[str, Any]) -> Any:
    """Return an object of a class of the operator's client with these fields."""
    names = {key: name for name, key in model.attribute_map.items()}
    return model(**{names[key]: value for key, value in values.items()})
