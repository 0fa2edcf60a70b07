"""Table of GPUs by PCI device id: name, generation, tiles, and support by PyTorch.

The ids and names are from Intel's driver (intel/compute-runtime, `devices_base.inl`) or, if it has
no name, from Intel's product pages.  A GPU newer than this table is identified by its id and
assumed to be usable: torch raises if it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CARDS", "Card", "card_of"]

_HPC, _HPG, _LPG, _XE2, _XE3 = "Xe-HPC", "Xe-HPG", "Xe-LPG", "Xe2", "Xe3"
_XE_LP, _BEFORE_XE = "Xe-LP", "before Xe"


@dataclass(frozen=True)
class Card:
    """A model of GPU.

    Attributes:
        name: Intel's name, without trade marks: "Data Center GPU Max 1550".
        generation: Generation of its architecture, "Xe-HPC"; empty if the id is unknown.
        tiles: Tiles (stacks) behind its one PCI address.
        memory: GiB on the card; 0 if it uses the host's memory or has several sizes.
        integrated: True if it is part of a processor.
    """

    name: str
    generation: str = ""
    tiles: int = 1
    memory: int = 0
    integrated: bool = False

    @property
    def usable(self) -> bool:
        """True if PyTorch's builds for Intel GPUs have kernels for it, as far as is known."""
        return self.generation not in {_XE_LP, _BEFORE_XE}

    @property
    def has_driver(self) -> bool:
        """True if the current Level Zero driver supports it."""
        return self.generation != _BEFORE_XE

    @property
    def is_max(self) -> bool:
        """True for the Max series: several tiles, links between cards, float64."""
        return self.generation == _HPC

    @property
    def is_arc(self) -> bool:
        """True for a discrete Arc card (or the Flex series, which has the same chips)."""
        return not self.integrated and self.generation in {_HPG, _XE2}


_MAX_1550 = Card("Data Center GPU Max 1550", _HPC, 2, 128)
_MAX_1350 = Card("Data Center GPU Max 1350", _HPC, 2, 96)
_MAX_1450 = Card("Data Center GPU Max 1450", _HPC, 2)
_MAX_1100 = Card("Data Center GPU Max 1100", _HPC, 1, 48)


def _discrete(generation: str, named: Mapping[int, tuple[str, int]]) -> dict[int, Card]:
    """Return cards of one tile, from names and GiB."""
    return {
        device_id: Card(name, generation, 1, memory) for device_id, (name, memory) in named.items()
    }


def _integrated(name: str, generation: str, *ids: int) -> dict[int, Card]:
    return dict.fromkeys(ids, Card(name, generation, integrated=True))


_BY_ID: Mapping[int, Card] = {
    0x0B69: _MAX_1450,
    0x0B6E: _MAX_1100,
    0x0BD0: Card("Data Center GPU Max", _HPC, 2),
    0x0BD4: _MAX_1550,
    0x0BD5: _MAX_1550,
    0x0BD6: _MAX_1550,
    0x0BD7: _MAX_1350,
    0x0BD8: _MAX_1350,
    0x0BD9: _MAX_1100,
    0x0BDA: _MAX_1100,
    0x0BDB: _MAX_1100,
    **_discrete(
        _HPG,
        {
            0x5690: ("Arc A770M Graphics", 16),
            0x5691: ("Arc A730M Graphics", 12),
            0x5692: ("Arc A550M Graphics", 8),
            0x5693: ("Arc A370M Graphics", 4),
            0x5694: ("Arc A350M Graphics", 4),
            0x5696: ("Arc A570M Graphics", 8),
            0x5697: ("Arc A530M Graphics", 0),
            0x56A0: ("Arc A770 Graphics", 0),
            0x56A1: ("Arc A750 Graphics", 8),
            0x56A2: ("Arc A580 Graphics", 8),
            0x56A5: ("Arc A380 Graphics", 6),
            0x56A6: ("Arc A310 LP Graphics", 4),
            0x56AF: ("Arc A760A Graphics", 16),
            0x56B0: ("Arc Pro A30M Graphics", 4),
            0x56B1: ("Arc Pro A40/A50 Graphics", 6),
            0x56B2: ("Arc Pro A60M Graphics", 8),
            0x56B3: ("Arc Pro A60 Graphics", 12),
            0x56BA: ("Arc A380E Graphics", 6),
            0x56BB: ("Arc A310E Graphics", 4),
            0x56BC: ("Arc A370E Graphics", 4),
            0x56BD: ("Arc A350E Graphics", 4),
            0x56BE: ("Arc A750E Graphics", 0),
            0x56BF: ("Arc A580E Graphics", 0),
            0x56C0: ("Data Center GPU Flex 170", 16),
            0x56C1: ("Data Center GPU Flex 140", 6),
            0x56C2: ("Data Center GPU Flex 170V", 16),
        },
    ),
    **_discrete(
        _XE2,
        {
            0xE209: ("Arc B580 Graphics", 12),
            0xE20B: ("Arc B580 Graphics", 12),
            0xE20C: ("Arc B570 Graphics", 10),
            0xE211: ("Arc Pro B60 Graphics", 24),
            0xE212: ("Arc Pro B50 Graphics", 16),
            0xE222: ("Arc Pro B65 Graphics", 32),
            0xE223: ("Arc Pro B70 Graphics", 32),
        },
    ),
    **_integrated("Arc Graphics (Meteor Lake)", _LPG, 0x7D55, 0x7DD5),
    **_integrated("Graphics (Meteor Lake)", _LPG, 0x7D40, 0x7D45),
    **_integrated("Arc Graphics (Arrow Lake)", _LPG, 0x7D51, 0x7DD1),
    **_integrated("Graphics (Arrow Lake)", _LPG, 0x7D41, 0x7D67),
    **_integrated("Arc Graphics (Lunar Lake)", _XE2, 0x64A0),
    **_integrated("Graphics (Lunar Lake)", _XE2, 0x6420, 0x64B0),
    **_integrated("Arc B390 GPU (Panther Lake)", _XE3, 0xB080, 0xB082),
    **_integrated("Arc B370 GPU (Panther Lake)", _XE3, 0xB081, 0xB083),
    **_integrated(
        "Graphics (Panther Lake)",
        _XE3,
        *(0xB084, 0xB085, 0xB086, 0xB087, 0xB08F, 0xB090, 0xB0A0, 0xB0B0, 0xFD80, 0xFD81),
    ),
}

CARDS: Mapping[str, Card] = {f"0x{number:04x}": card for number, card in _BY_ID.items()}
"""By PCI device id, as the kernel writes it: "0x0bd5"."""

_LP_IDS = {0x9A: "Tiger Lake", 0x4C: "Rocket Lake", 0x46: "Alder Lake", 0xA7: "Raptor Lake"}
_DG1 = 0x49
_OLD_IDS = frozenset(
    bytes.fromhex("01 04 0a 0c 0d 0f 16 19 1a 22 25 27 29 2a 2e 31 3e 45 4e 59 5a 87 8a 98 9b a0")
)
"""First bytes of the ids of graphics from before Xe; no newer GPU has one of them."""
_OF_PROCESSOR = "0000:00:02.0"
"""PCI address of a processor's own GPU."""


def card_of(device_id: str, address: str = "") -> Card:
    """Return the model of a PCI device id.

    Args:
        device_id: Id as the kernel writes it, "0x0bd5".
        address: Its PCI address, which identifies a processor's own GPU if the id does not.
    """
    known = CARDS.get(device_id.lower())
    if known is not None:
        return known
    integrated = address == _OF_PROCESSOR
    try:
        first = int(device_id, 16) >> 8
    except ValueError:
        return Card("GPU of unknown model", integrated=integrated)
    if first in _LP_IDS:
        return Card(f"graphics of {_LP_IDS[first]} {device_id}", _XE_LP, integrated=True)
    if first == _DG1:
        return Card(f"Iris Xe MAX {device_id}", _XE_LP)
    if first in _OLD_IDS:
        return Card(f"graphics from before Xe {device_id}", _BEFORE_XE, integrated=True)
    return Card(f"GPU {device_id}", integrated=integrated)
