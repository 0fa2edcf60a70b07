"""The XPU probe on simulated machines: GPUs, drivers, masks, libraries, builds of torch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from lmcore.contract import Probe, ProbeState, TorchBuild
from lmcore_xpu import plugin
from lmcore_xpu.detection.facts import Facts, Gpu
from lmcore_xpu.detection.visible import units_of
from lmcore_xpu.probe import counted_gpus, mixed, probe


def gpu(place, device_id, tiles=1, memory=0, **more):
    """Return a GPU that is in order at a place of the bus; place 0 is the processor's."""
    address = f"0000:{place:02x}:00.0" if place else "0000:00:02.0"
    node = f"renderD{128 + place}"
    return Gpu(address, device_id, "xe", node, True, tiles, memory, **{"group": "render"} | more)


CARDS = tuple(gpu(place, "0x0bd5", 2, 128 << 30) for place in (3, 4, 5))
ARC, OTHER_ARC = gpu(3, "0xe20b", 1, 12 << 30), gpu(4, "0x56a0")
OWN, OLD, ANCIENT = gpu(0, "0x7d55"), gpu(0, "0xa780"), gpu(0, "0x1912")
XPU_TORCH = TorchBuild("2.13.0+xpu", "20250302")
CPU_TORCH = TorchBuild("2.13.0+cpu", None)
FIT = Facts(CARDS, True, True, XPU_TORCH, "6.14.0")


def having(*gpus, **more):
    return replace(FIT, gpus=gpus, **more)


def with_cards(**more):
    return replace(FIT, gpus=tuple(replace(card, **more) for card in CARDS))


SHUT = {"access": False, "error": errno.EACCES}
KEPT = {"access": False, "error": errno.EPERM}
HALF = having(replace(CARDS[0], **SHUT), *CARDS[1:])
WITHOUT = {"driver": None, "node": None, "access": None}
LISTED = (
    "3 x Data Center GPU Max 1550 (0x0bd5) of 2 tiles at 0000:03:00.0, 0000:04:00.0, "
    "0000:05:00.0, driver xe"
)
PIP = "pip install --force-reinstall"
COMPOSITE = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}


@pytest.mark.parametrize(
    "facts, env, state, count, evidence, fix",
    [
        (FIT, {}, "present", 6, LISTED, None),
        (FIT, COMPOSITE, "present", 3, "Max 1550", None),
        (FIT, {"ZE_AFFINITY_MASK": "0,4"}, "present", 2, "leaves 2 of 6 tiles, on 2 of 3", None),
        (FIT, {"ZE_AFFINITY_MASK": ""}, "present", 6, "built for XPU 20250302", None),
        (FIT, {"ZE_AFFINITY_MASK": "-1"}, "absent", 0, "hides all 6 tiles", None),
        (FIT, {"ZE_AFFINITY_MASK": "7"}, "broken", 3, "hides all 6 tiles", "numbers from 0 to 5"),
        (FIT, {"ZE_AFFINITY_MASK": "0.0"}, "broken", 3, "is a tile of a card", "=COMPOSITE"),
        (FIT, {"ZE_AFFINITY_MASK": "x"}, "broken", 3, "cannot be read", "unset it"),
        (FIT, {"ONEAPI_DEVICE_SELECTOR": "opencl:*"}, "broken", 3, "leaves none", "level_zero:gpu"),
        (FIT, {"ONEAPI_DEVICE_SELECTOR": "*:cpu"}, "absent", 0, "leaves no GPU", None),
        (having(), {}, "absent", 0, "no Intel GPU", None),
        (having(OLD), {}, "absent", 0, "PyTorch has no kernels for this GPU", None),
        (having(ANCIENT), {}, "absent", 0, "the processor's graphics from before Xe 0x1912", None),
        (having(ANCIENT, ARC), {"ZE_AFFINITY_MASK": "0"}, "present", 1, "driver xe", None),
        (having(OLD, ARC), {"ZE_AFFINITY_MASK": "0"}, "absent", 0, "no kernels for gra", None),
        (having(OWN), {}, "present", 1, "the processor's Arc Graphics (Meteor Lake)", None),
        (having(OWN, ARC), {}, "present", 1, "torch leaves the processor's GPU out", None),
        (with_cards(**WITHOUT), {}, "broken", 6, "no kernel driver of Linux 6.14.0", "`i915`"),
        (with_cards(node=None, access=None), {}, "broken", 6, "no kernel driver", "`xe`"),
        (having(replace(ARC, **WITHOUT), kernel=""), {}, "broken", 1,
         "no kernel driver serves the GPU at 0000:03:00.0", "Linux 6.12 or newer that knows Arc B"),
        (with_cards(access=None), {}, "broken", 6, "/dev/dri/renderD131 is not in this container",
         "--device /dev/dri"),
        (with_cards(**SHUT), {}, "broken", 6, "may not open /dev/dri/renderD131",
         "run `sudo usermod -aG render $USER` and log in again"),
        (with_cards(**SHUT, group="video"), {}, "broken", 6, "may not", "-aG video $USER"),
        (with_cards(**SHUT, group="root"), {}, "broken", 6, "may not", "ask the administrator"),
        (replace(with_cards(**SHUT, group="109"), container=True), {}, "broken", 6, "may not",
         "start the container with `--device /dev/dri --group-add 109`"),
        (having(replace(OWN, **SHUT), replace(ARC, **SHUT)), {}, "broken", 1,
         "may not open /dev/dri/renderD131", "usermod"),
        (with_cards(**KEPT), {}, "absent", 0, "3 Intel GPUs are not given to this process", None),
        (replace(with_cards(**KEPT, group="9"), container=True), {}, "broken", 6, "may not open",
         "--device /dev/dri --group-add 9"),
        (having(replace(CARDS[0], **KEPT), *CARDS[1:]), {}, "present", 4, "1 of 3 GPUs", None),
        (with_cards(access=False, error=errno.EIO), {}, "broken", 6,
         "/dev/dri/renderD131 does not open: Input/output error", "`dmesg`"),
        (replace(FIT, loader=False), {}, "broken", 6, "libze_loader.so.1", "libze1"),
        (replace(FIT, runtime=False), {}, "broken", 6, "libze_intel_gpu.so.1", "libze-intel-gpu1"),
        (replace(FIT, torch=CPU_TORCH), {}, "broken", 6, "built without XPU",
         f"{PIP} 'torch==2.13.0' --index-url https://download.pytorch.org/whl/xpu"),
        (replace(FIT, torch=TorchBuild("", None)), {}, "broken", 6, "no torch", "'torch' --index"),
        (HALF, {}, "present", 4, "closed to this process: /dev/dri/renderD131", None),
        (having(Gpu("WSL", "", "dxgkrnl", "dxg", True)), {}, "present", 1, "at WSL", None),
    ],
)  # fmt: skip
def test_every_state_of_a_machine(facts, env, state, count, evidence, fix):
    """State, count, evidence and fix tell the truth about GPUs, nodes, libraries and torch."""
    found = probe(facts, {"PATH": "/bin", **env})
    assert (found.device_type, found.state, found.count) == ("xpu", state, count)
    assert evidence in "\n".join(found.evidence)
    assert (found.fix is None) == (fix is None)
    assert fix is None or fix in found.fix


@pytest.mark.parametrize("state, torch", [("present", XPU_TORCH), ("broken", CPU_TORCH)])
def test_versions_are_reported_in_every_state(state, torch):
    """Driver, runtime and build of torch are what someone who looks for a fault needs."""
    found = probe(replace(FIT, torch=torch), {})
    assert found.state == state
    assert found.facts["driver"] == "xe of Linux 6.14.0"
    assert found.facts["torch_build"] == torch.version
    assert found.facts.get("runtime") == ("oneAPI 20250302" if torch.toolkit else None)


def test_a_machine_without_a_driver_reports_none():
    """The fact is left out, not empty."""
    assert "driver" not in probe(with_cards(driver=None), {}).facts


def test_each_device_is_described_in_torchs_order():
    """The fourth process's device is the second tile of the second card, with half its memory."""
    facts = probe(FIT, {}).facts
    assert facts["hierarchy"] == "FLAT"
    assert facts["gpus"][3] == {
        "name": "Data Center GPU Max 1550",
        "generation": "Xe-HPC",
        "integrated": False,
        "address": "0000:04:00.0",
        "device_id": "0x0bd5",
        "driver": "xe",
        "tiles": [1],
        "tiles_of_card": 2,
        "memory": 64 << 30,
    }
    whole = probe(FIT, COMPOSITE).facts
    assert whole["hierarchy"] == "COMPOSITE"
    assert [gpu["tiles"] for gpu in whole["gpus"]] == [[0, 1]] * 3
    assert whole["gpus"][0]["memory"] == 128 << 30


def test_the_answer_travels_as_json():
    """The launcher hands it to the workers."""
    found = probe(FIT, {})
    again = Probe.from_dict(json.loads(json.dumps(asdict(found))))
    assert again.facts == found.facts


def test_a_nightly_torch_is_not_offered_from_the_index():
    """The command names a release only where it is one."""
    nightly = replace(FIT, torch=TorchBuild("2.14.0.dev20261101+cpu", None))
    assert "'torch' --index-url" in probe(nightly, {}).fix


def test_different_gpus_are_reported_with_a_mask_for_one_kind():
    """A run over them waits for the slowest; it is no fault."""
    two = gpu(5, "0xe20b")
    found = probe(having(OWN, OTHER_ARC, ARC, two), {})
    assert (found.state, found.count) == ("present", 3)
    text = "\n".join(found.evidence)
    assert "different GPUs: 1 x Arc A770 Graphics, 2 x Arc B580 Graphics; a run waits" in text
    assert "`export ZE_AFFINITY_MASK=2,3` leaves Arc B580 Graphics alone" in text
    assert probe(having(OWN, OTHER_ARC, ARC, two), {"ZE_AFFINITY_MASK": "2,3"}).count == 2


def test_tiles_of_one_card_are_alike():
    """Only models differ."""
    assert mixed(units_of(CARDS, {}), CARDS, {}) == ("", "")


def test_level_zero_counts_what_it_can_open():
    """A closed GPU has no number; where all are closed, each has."""
    assert counted_gpus(HALF.gpus) == list(CARDS[1:])
    shut = [replace(gpu, **SHUT) for gpu in (ANCIENT, *CARDS)]
    assert counted_gpus(shut) == shut[1:]


def test_the_probe_of_this_machine_loads_no_torch():
    """The hooks answer in a fresh interpreter without importing torch."""
    script = (
        "import os, sys; from lmcore_xpu import plugin; plugin.lmcore_plugin_info();"
        "found = plugin.lmcore_probe(os.environ); plugin.lmcore_launch_env(found, {});"
        "sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0


def test_the_probe_is_one_of_the_contract():
    """The hook returns a `Probe` with a state."""
    found = plugin.lmcore_probe({})
    assert isinstance(found, Probe)
    assert isinstance(found.state, ProbeState)
