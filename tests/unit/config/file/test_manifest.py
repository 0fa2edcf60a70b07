"""Manifests of Kubernetes: the commands of their containers."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.file.manifest import is_manifest, read_manifest

JOB = """\
apiVersion: v1
kind: Service
metadata: {name: etcd}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: ${NODES}
      template: &template
        spec:
          initContainers:
          - {name: wait, command: [sleep, "1"]}
          containers:
          - name: pytorch
            env:
            - {name: RATE, value: "6.0e-5"}
            - {name: UNUSED, value: "$OTHER"}
            command: [torchrun, "--nnodes=${NODES}"]
            args:
            - pretrain_gpt.py
            - --num-layers=${LAYERS}
            - --lr=$(RATE)
            - --save
            - 'a "b" \\c'
            - --log-interval
            - 010
    Master:
      template: *template
"""
SCRIPT = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
      - name: prepare
        command: ["/bin/bash", "-c"]
        args:
          - cd /data
            pwd;
            python3 tools/preprocess_data.py
            --input ${FOLDER}/a.jsonl
            --workers 64;
            echo "done"
"""


def test_words_are_those_of_the_container() -> None:
    """Variables of the template and of `env` are replaced; an alias is read once."""
    script = read_manifest(JOB, {"LAYERS": "24", "NODES": "2"})
    flags = ["--num-layers=24", "--lr=6.0e-5", "--save", 'a "b" \\c', "--log-interval", "010"]
    assert script.commands == [
        ["sleep", "1"],
        ["torchrun", "--nnodes=2", "pretrain_gpt.py", *flags],
    ]
    assert script.unknown == []
    assert "lmcore launch k8s" in script.notes[-1]


def test_a_script_in_a_container_is_read() -> None:
    """The argument of `bash -c` is a script, whose lines YAML has joined."""
    script = read_manifest(SCRIPT, {})
    command = ["python3", "tools/preprocess_data.py", "--input", "${FOLDER}/a.jsonl"]
    assert [*command, "--workers", "64"] in script.commands
    assert script.unknown == ["${FOLDER}"]


def test_names_of_the_template_may_be_given() -> None:
    """A variable of another part of the manifest is one of the template; another name is not."""
    assert read_manifest(JOB, {"OTHER": "1"}).commands
    with pytest.raises(ConfigError, match="no variable `LAYER`") as caught:
        read_manifest(JOB, {"LAYER": "1"})
    assert "`LAYERS`" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text,what",
    [
        ("containers: [{image: a}]\n", "no container of the manifest has a command"),
        ("containers: [{command: sleep}, 3, {command: [[a]]}]\n", "no container of"),
        ("containers: {command: [a]}\n", "no container of"),
        ("containers: [\n", "is no YAML"),
        ("containers: [!include a]\n", "is no YAML"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "is no YAML"),
        ("a: " + "x" * (1 << 18) + "\n", "longer than 256 KiB"),
    ],
)
def test_what_has_no_command_is_refused(text: str, what: str) -> None:
    """Manifests without a command, of another form, and texts that cannot be read."""
    with pytest.raises(ConfigError, match=what):
        read_manifest(f"apiVersion: v1\nkind: Job\n{text}", {})


@pytest.mark.parametrize(
    "text,wanted",
    [
        (JOB, True),
        ("kind: Job\n", False),
        ("#!/bin/bash\ncat <<E\n  apiVersion: v1\n  kind: Job\nE\n", False),
    ],
)
def test_a_manifest_is_told_from_a_script(text: str, *, wanted: bool) -> None:
    """Both keys begin a line of it."""
    assert is_manifest(text) is wanted
