"""The probe distinguishes absent, broken and present devices, without torch_xla."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmcore.contract import ProbeState
from lmcore_xla.probe import Facts, probe, read_facts

NOTHING = Facts(chips=(), torch="2.9.1", torch_xla="2.9.0", clients=())
NEWEST = "pip install 'torch~=2.9.0' 'torch_xla~=2.9.0'"
TPUS = replace(NOTHING, chips=("0000:00:04.0", "0000:00:05.0"))


def test_without_a_tpu_and_a_wish_the_device_is_absent():
    """The evidence says how to try the host, since nothing else would."""
    found = probe(NOTHING, {})
    assert found.state is ProbeState.ABSENT
    assert "PJRT_DEVICE=CPU" in found.evidence[0]


def test_every_tpu_chip_is_a_device():
    found = probe(TPUS, {})
    assert (found.state, found.count, found.priority) == (ProbeState.PRESENT, 2, 100)
    assert (found.facts["pjrt_device"], found.facts["on_host"]) == ("TPU", False)
    assert found.evidence == ("2 TPU chips at 0000:00:04.0, 0000:00:05.0",)


def test_the_hosts_client_is_one_device_after_all_others():
    """It is there to try programs; a TPU that is there too does not count."""
    for facts in (NOTHING, TPUS):
        found = probe(facts, {"PJRT_DEVICE": "CPU"})
        assert (found.state, found.count, found.priority) == (ProbeState.PRESENT, 1, -50)
        assert (found.facts["pjrt_device"], found.facts["on_host"]) == ("CPU", True)


def test_a_client_of_another_package_is_present():
    facts = replace(NOTHING, clients=("MYCHIP",))
    found = probe(facts, {"PJRT_DEVICE": "mychip"})
    assert (found.state, found.facts["pjrt_device"]) == (ProbeState.PRESENT, "MYCHIP")


@pytest.mark.parametrize(
    "facts,env,fault,fix",
    [
        (replace(TPUS, torch_xla=None), {}, "not installed", "pip install 'torch_xla~=2.9.0'"),
        (replace(TPUS, torch_xla=None, torch="2.8.0"), {}, "not installed", "torch_xla~=2.8.0"),
        (replace(TPUS, torch_xla=None, torch=""), {}, "not installed", NEWEST),
        (replace(TPUS, torch_xla=None, torch="2.13.0"), {}, "not installed", NEWEST),
        (replace(TPUS, torch="2.13.0"), {}, "needs torch 2.9, and torch 2.13.0", "torch~=2.9.0"),
        (replace(TPUS, torch=""), {}, "torch is not installed", "torch~=2.9.0"),
        (NOTHING, {"PJRT_DEVICE": "TPU"}, "no TPU on the PCI bus", "unset `PJRT_DEVICE`"),
        (
            NOTHING,
            {"PJRT_DEVICE": "gpu"},
            "no PJRT client is called `GPU`",
            "CPU, NEURON, TPU, XPU",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_broken_with_a_fix(facts, env, fault, fix):
    found = probe(facts, env)
    assert found.state is ProbeState.BROKEN
    assert fault in found.evidence[0]
    assert fix in (found.fix or "")


def test_no_torch_xla_is_suggested_that_does_not_exist():
    """There is none for a newer torch than 2.9: the fix replaces torch as well, and says why."""
    found = probe(replace(TPUS, torch_xla=None, torch="2.13.0"), {})
    assert "torch_xla~=2.13" not in (found.fix or "")
    assert "no torch_xla for torch 2.13 is known" in (found.fix or "")


def test_the_bus_is_read(tmp_path: Path):
    """Only devices with the vendor and the kind of a TPU count."""
    for number, (vendor, device) in enumerate(
        [
            *(("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")),
            ("0x1ae0", "0x0062"),
        ]
    ):
        folder = tmp_path / f"0000:00:0{number}.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n", encoding="utf-8")
        (folder / "device").write_text(device + "\n", encoding="utf-8")
    (tmp_path / "unreadable").mkdir()
    assert read_facts(tmp_path).chips == ("0000:00:00.0", "0000:00:03.0")


def test_neither_torch_nor_torch_xla_is_loaded():
    code = (
        "import sys\nfrom lmcore_xla import plugin\nplugin.lmcore_probe({'PJRT_DEVICE': 'CPU'})\n"
        "print(sorted({'torch', 'torch_xla'} & set(sys.modules)))"
    )
    source = str(Path(__file__).parents[1] / "src")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{code}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
