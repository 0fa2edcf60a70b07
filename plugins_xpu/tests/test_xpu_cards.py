"""Names of GPUs by PCI device id."""

from __future__ import annotations

import pytest

from lmcore_xpu.detection.cards import CARDS, card_of


@pytest.mark.parametrize(
    "device_id, name, generation, tiles, memory, integrated",
    [
        ("0x0bd5", "Data Center GPU Max 1550", "Xe-HPC", 2, 128, False),
        ("0x0BD6", "Data Center GPU Max 1550", "Xe-HPC", 2, 128, False),
        ("0x0bd8", "Data Center GPU Max 1350", "Xe-HPC", 2, 96, False),
        ("0x0b69", "Data Center GPU Max 1450", "Xe-HPC", 2, 0, False),
        ("0x0bda", "Data Center GPU Max 1100", "Xe-HPC", 1, 48, False),
        ("0x56a0", "Arc A770 Graphics", "Xe-HPG", 1, 0, False),
        ("0x56a5", "Arc A380 Graphics", "Xe-HPG", 1, 6, False),
        ("0x5691", "Arc A730M Graphics", "Xe-HPG", 1, 12, False),
        ("0x56c0", "Data Center GPU Flex 170", "Xe-HPG", 1, 16, False),
        ("0x56c1", "Data Center GPU Flex 140", "Xe-HPG", 1, 6, False),
        ("0xe20b", "Arc B580 Graphics", "Xe2", 1, 12, False),
        ("0xe20c", "Arc B570 Graphics", "Xe2", 1, 10, False),
        ("0xe211", "Arc Pro B60 Graphics", "Xe2", 1, 24, False),
        ("0xe212", "Arc Pro B50 Graphics", "Xe2", 1, 16, False),
        ("0xe223", "Arc Pro B70 Graphics", "Xe2", 1, 32, False),
        ("0x7d55", "Arc Graphics (Meteor Lake)", "Xe-LPG", 1, 0, True),
        ("0x7d51", "Arc Graphics (Arrow Lake)", "Xe-LPG", 1, 0, True),
        ("0x64a0", "Arc Graphics (Lunar Lake)", "Xe2", 1, 0, True),
        ("0xb080", "Arc B390 GPU (Panther Lake)", "Xe3", 1, 0, True),
        ("0xb0a0", "Graphics (Panther Lake)", "Xe3", 1, 0, True),
    ],
)
def test_known_ids(device_id, name, generation, tiles, memory, integrated):
    """Each model has its name, generation, tiles and memory; all of them run PyTorch."""
    card = card_of(device_id)
    assert (card.name, card.generation) == (name, generation)
    assert (card.tiles, card.memory, card.integrated) == (tiles, memory, integrated)
    assert card.usable
    assert card.has_driver


@pytest.mark.parametrize(
    "device_id, address, name, usable, has_driver, integrated",
    [
        ("0x9a49", "", "graphics of Tiger Lake 0x9a49", False, True, True),
        ("0x4680", "0000:00:02.0", "graphics of Alder Lake 0x4680", False, True, True),
        ("0xa780", "0000:00:02.0", "graphics of Raptor Lake 0xa780", False, True, True),
        ("0x4c8a", "0000:00:02.0", "graphics of Rocket Lake 0x4c8a", False, True, True),
        ("0x4905", "0000:03:00.0", "Iris Xe MAX 0x4905", False, True, False),
        ("0x1912", "0000:00:02.0", "graphics from before Xe 0x1912", False, False, True),
        ("0x3e92", "0000:00:02.0", "graphics from before Xe 0x3e92", False, False, True),
        ("0xf0f0", "0000:00:02.0", "GPU 0xf0f0", True, True, True),
        ("0xf0f0", "0000:03:00.0", "GPU 0xf0f0", True, True, False),
        ("", "WSL", "GPU of unknown model", True, True, False),
    ],
)
def test_other_ids(device_id, address, name, usable, has_driver, integrated):
    """Old graphics are identified by their first byte, a newer GPU by its id and its address."""
    card = card_of(device_id, address)
    assert card.name == name
    assert (card.usable, card.has_driver, card.integrated) == (usable, has_driver, integrated)


def test_no_known_id_is_taken_for_an_old_one():
    """The first bytes of old graphics are none of the table's."""
    assert all(card_of(device_id) is card for device_id, card in CARDS.items())
    assert all(card.usable for card in CARDS.values())


@pytest.mark.parametrize(
    "device_id, is_max, is_arc",
    [
        ("0x0bd5", True, False),
        ("0xe20b", False, True),
        ("0x56c0", False, True),
        ("0x64a0", False, False),
        ("0xffff", False, False),
    ],
)
def test_series(device_id, is_max, is_arc):
    """Advice differs between the Max series, discrete Arc cards and the rest."""
    card = card_of(device_id)
    assert (card.is_max, card.is_arc) == (is_max, is_arc)
