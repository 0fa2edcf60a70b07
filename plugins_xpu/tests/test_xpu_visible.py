"""Level Zero's and SYCL's variables, as their drivers read them."""

from __future__ import annotations

import pytest

from lmcore_xpu.detection.facts import Gpu
from lmcore_xpu.detection.selector import Unit, select
from lmcore_xpu.detection.visible import mask_of, units_of, visible_units


def gpu(place, device_id, tiles=1):
    """Return a GPU at a place of the bus; place 0 is the processor's."""
    address = f"0000:{place:02x}:00.0" if place else "0000:00:02.0"
    return Gpu(address, device_id, "xe", f"renderD{128 + place}", True, tiles)


MAX = tuple(gpu(place, "0x0bd5", 2) for place in (1, 2, 3))
ARCS = tuple(gpu(place, "0xe20b") for place in (3, 4))
OWN = gpu(0, "0x7d55")
OLD = gpu(0, "0xa780")


def seen(gpus, **env):
    """Return what is visible, each device as its place on the bus and its tiles."""
    found = visible_units(gpus, env)
    return found, [(int(unit.gpu.address[5:7], 16), unit.tiles) for unit in found.units]


@pytest.mark.parametrize("hierarchy", [None, "", "FLAT", "COMBINED"])
def test_a_tile_is_a_device_by_default(hierarchy):
    """Three cards of two tiles are six devices, in the bus's order."""
    env = {} if hierarchy is None else {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    found, units = seen(MAX, **env)
    assert units == [(1, (0,)), (1, (1,)), (2, (0,)), (2, (1,)), (3, (0,)), (3, (1,))]
    assert found.evidence == ()
    assert not any(unit.whole for unit in found.units)


def test_a_card_is_a_device_in_the_composite_hierarchy():
    """With all of its tiles, and the memory of all."""
    found, units = seen(MAX, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    assert units == [(1, (0, 1)), (2, (0, 1)), (3, (0, 1))]
    assert all(unit.whole for unit in found.units)


def test_memory_is_the_share_of_the_tiles():
    """Half of the card for one of two tiles."""
    gpu = Gpu("0000:03:00.0", "0x0bd5", "xe", "renderD128", True, 2, 128)
    assert Unit(gpu, (1,)).memory == 64
    assert Unit(gpu, (0, 1)).memory == 128


def test_an_unknown_hierarchy_is_reported():
    """The driver compares whole words, in capitals."""
    found, units = seen(MAX, ZE_FLAT_DEVICE_HIERARCHY="composite")
    assert len(units) == 6
    assert "`ZE_FLAT_DEVICE_HIERARCHY=composite` is none of FLAT" in found.evidence[0]


@pytest.mark.parametrize(
    "hierarchy, mask, units, evidence",
    [
        ("FLAT", "", 6, None),
        ("FLAT", "default", 6, None),
        ("FLAT", "0", [(1, (0,))], "leaves 1 of 6 tiles, on 1 of 3 cards"),
        ("FLAT", "5,0", [(1, (0,)), (3, (1,))], "leaves 2 of 6 tiles, on 2 of 3 cards"),
        ("FLAT", " 1 , 1,", [(1, (1,))], "leaves 1 of 6 tiles"),
        ("FLAT", "0,1,2", [(1, (0,)), (1, (1,)), (2, (0,))], "leaves 3 of 6 tiles, on 2 of 3"),
        ("FLAT", "0,9", [(1, (0,))], "ignores `9`"),
        ("FLAT", "0,-1", [(1, (0,))], "ignores `-1`"),
        ("FLAT", "0.1,2", [(2, (0,))], "ignores `0.1`"),
        ("COMBINED", "3,1", [(1, (1,)), (2, (1,))], "leaves 2 of 6 tiles"),
        ("COMPOSITE", "1", [(2, (0, 1))], "leaves 1 of 3 GPUs, with 2 of 6 tiles"),
        ("COMPOSITE", "0.0", [(1, (0,))], "leaves 1 of 3 GPUs, with 1 of 6 tiles"),
        ("COMPOSITE", "0.1,0.0", [(1, (0, 1))], "leaves 1 of 3 GPUs, with 2 of 6 tiles"),
        ("COMPOSITE", "2.1,0", [(1, (0, 1)), (3, (1,))], "leaves 2 of 3 GPUs, with 3 of 6 tiles"),
        ("COMPOSITE", "0,1.7", [(1, (0, 1))], "ignores `1.7`"),
        ("COMPOSITE", "0,0.1", [(1, (0, 1))], "leaves 1 of 3 GPUs"),
    ],
)  # fmt: skip
def test_what_a_mask_leaves(hierarchy, mask, units, evidence):
    """A number is a tile or a card; what names nothing is passed by; the order is the bus's."""
    found, left = seen(MAX, ZE_FLAT_DEVICE_HIERARCHY=hierarchy, ZE_AFFINITY_MASK=mask)
    assert left == units if isinstance(units, list) else len(left) == units
    assert (evidence or "") in "\n".join(found.evidence)
    assert not found.fault


@pytest.mark.parametrize("mask", ["-1", "-1,-2"])
def test_hiding_all_on_purpose_is_no_fault(mask):
    """A negative number is a request for no device."""
    found, left = seen(ARCS, ZE_AFFINITY_MASK=mask)
    assert (found.hidden, found.fault, left) == (True, "", [])
    assert found.evidence == (f"`ZE_AFFINITY_MASK={mask}` hides all 2 GPUs",)


@pytest.mark.parametrize(
    "gpus, hierarchy, mask, fault, fix",
    [
        (MAX, "FLAT", "6", "hides all 6 tiles: `6` is no device here", "numbers from 0 to 5"),
        (ARCS[:1], "FLAT", "1", "hides the only GPU: `1` is no device here", "to 0 separated"),
        (MAX, "FLAT", "0.0,0.1", "`0.0` is a tile of a card, and tiles are devices of their own",
         "`export ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE`, or `export ZE_AFFINITY_MASK=0,1`"),
        (MAX, "COMBINED", "2.1", "is a tile of a card", "`export ZE_AFFINITY_MASK=5`"),
        (MAX, "FLAT", "8.8", "is a tile of a card", "`export ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE`"),
        (MAX, "COMPOSITE", "0.2", "hides all 3 GPUs: `0.2` is no device", "tiles such as `0.1`"),
        (ARCS, "COMPOSITE", "4", "hides all 2 GPUs: `4` is no device", "numbers from 0 to 1 sep"),
        (MAX, "COMPOSITE", "0.0.1", "cannot be read: `0.0.1` is no device", "unset it"),
        (MAX, "FLAT", "gpu0", "cannot be read: `gpu0` is no device", "numbers from 0 to 5"),
        (MAX, "FLAT", "0,,1", "cannot be read: `` is no device", "separated by commas"),
    ],
)  # fmt: skip
def test_hiding_all_by_mistake_is_one(gpus, hierarchy, mask, fault, fix):
    """The wrong entry is named, with valid values."""
    found, left = seen(gpus, ZE_FLAT_DEVICE_HIERARCHY=hierarchy, ZE_AFFINITY_MASK=mask)
    assert left == []
    assert not found.hidden
    assert fault in found.fault
    assert fix in found.fix


def test_a_mask_that_cannot_be_translated_is_not():
    """A tile that does not exist has no number among the tiles."""
    found, _ = seen(MAX, ZE_AFFINITY_MASK="8.8")
    assert "ZE_AFFINITY_MASK=" not in found.fix


def test_torch_leaves_the_processors_gpu_out():
    """The processor's GPU is dropped if a discrete one is left; a mask may select it alone."""
    found, left = seen((OWN, *ARCS))
    assert [place for place, _ in left] == [3, 4]
    assert "torch leaves the processor's GPU out" in found.evidence[0]
    found, left = seen((OWN, *ARCS), ZE_AFFINITY_MASK="0")
    assert [place for place, _ in left] == [0]
    assert "leaves 1 of 3 GPUs" in found.evidence[0]


def test_level_zero_lists_cards_before_the_processors_gpu():
    """SYCL's number 0 is a card; the mask's is the processor's, which is first on the bus."""
    _, left = seen((OWN, *ARCS), ONEAPI_DEVICE_SELECTOR="level_zero:0")
    assert [place for place, _ in left] == [3]
    _, left = seen((OWN, *ARCS), ONEAPI_DEVICE_SELECTOR="level_zero:2")
    assert [place for place, _ in left] == [0]


def test_old_graphics_are_counted_and_not_used():
    """The driver numbers them; PyTorch has no kernels for them."""
    _, left = seen((OLD, *ARCS), ZE_AFFINITY_MASK="1,2")
    assert [place for place, _ in left] == [3, 4]
    found, left = seen((OLD, *ARCS), ZE_AFFINITY_MASK="0")
    assert (found.hidden, left) == (True, [])
    assert "PyTorch has no kernels for graphics of Raptor Lake" in found.evidence[0]
    dg1 = gpu(2, "0x4905")
    found, left = seen((dg1, *ARCS))
    assert "torch is given Iris Xe MAX 0x4905, which PyTorch has no kernels for" in found.fault
    assert found.fix == "leave it out: `export ZE_AFFINITY_MASK=1,2`"


def test_masks_are_written_as_they_are_read():
    """The mask of `mask_of` leaves the wanted devices."""
    for hierarchy in ("FLAT", "COMPOSITE"):
        env = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
        every = units_of(MAX, env)
        for wanted in (every[:1], every[1:], every[::2]):
            found = visible_units(MAX, {**env, "ZE_AFFINITY_MASK": mask_of(wanted, MAX, env)})
            assert list(found.units) == wanted


CARDS = [Unit(gpu, (0, 1)) for gpu in MAX]


@pytest.mark.parametrize(
    "selector, left",
    [
        ("", CARDS),
        ("level_zero:gpu", CARDS),
        ("*:*", CARDS),
        ("*:gpu;opencl:cpu", CARDS),
        ("Level_Zero:GPU;", CARDS),
        ("level_zero:1", CARDS[1:2]),
        ("level_zero:2,0", [CARDS[0], CARDS[2]]),
        ("opencl:*;level_zero:1", CARDS[1:2]),
        ("!level_zero:0", CARDS[1:]),
        ("level_zero:*;!level_zero:1", [CARDS[0], CARDS[2]]),
        ("!opencl:gpu", CARDS),
        ("level_zero:0.1", [Unit(MAX[0], (1,))]),
        ("level_zero:1.*", [Unit(MAX[1], (0,)), Unit(MAX[1], (1,))]),
        ("level_zero:*.0", [Unit(gpu, (0,)) for gpu in MAX]),
        ("level_zero:0,0.0.0", CARDS[:1]),
    ],
)
def test_what_a_selector_leaves(selector, left):
    """Terms of Level Zero's count, in its order; `!` takes away; a dot makes devices of tiles."""
    found = select(CARDS, {"ONEAPI_DEVICE_SELECTOR": selector})
    assert (list(found.units), found.fault) == (left, "")
    assert bool(found.evidence) == (left != CARDS)


@pytest.mark.parametrize(
    "selector", ["*:cpu", "opencl:cpu,fpga", "native_cpu:*", "!level_zero:*", "!*:gpu"]
)
def test_asking_for_processors_hides_gpus_on_purpose(selector):
    """A selector that hides all on purpose is no fault."""
    found, left = seen(ARCS, ONEAPI_DEVICE_SELECTOR=selector)
    assert (found.hidden, found.fault, left) == (True, "", [])
    assert found.evidence == (f"`ONEAPI_DEVICE_SELECTOR={selector}` leaves no GPU",)


@pytest.mark.parametrize(
    "selector, fault",
    [
        ("opencl:*", "leaves none of 2 Level Zero GPUs, which torch uses"),
        ("opencl:gpu", "leaves none of 2 Level Zero GPUs"),
        ("level_zero:5", "leaves none of 2 Level Zero GPUs"),
        ("level_zero:0.0", "leaves none of 2 Level Zero GPUs"),
        ("level_zero", "cannot be read: `level_zero` names no device behind a colon"),
        ("level_zero:", "names no device behind a colon"),
        ("ze:gpu", "`ze` is no backend"),
        ("level_zero:gpu0", "`gpu0` is no device"),
        ("gpu", "names no device behind a colon"),
    ],
)
def test_a_selector_that_leaves_none_by_mistake(selector, fault):
    """The message has the mistake, and valid values."""
    found, left = seen(ARCS, ONEAPI_DEVICE_SELECTOR=selector)
    assert left == []
    assert fault in found.fault
    assert "`level_zero:gpu`" in found.fix


def test_mask_and_selector_work_together():
    """SYCL counts what the mask has left."""
    found, left = seen(MAX, ZE_AFFINITY_MASK="2,3,4", ONEAPI_DEVICE_SELECTOR="level_zero:2")
    assert left == [(3, (0,))]
    assert len(found.evidence) == 2
