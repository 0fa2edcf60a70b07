"""Objects of other programs in their files: inert records, and code that is refused."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import pytest
from megatron_files import edit, one_rank
from megatron_models import GPT, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.foreign_pickle.records import load_content, values_of
from lmcore.conversion.megatron.rank_files.read import MegatronState


def os_array() -> Any:
    import numpy as np

    return np.arange(3, dtype=np.uint32)


class AttnBackend(enum.Enum):
    """Enum of megatron-core."""

    auto = 5


class Signals(enum.IntEnum):
    """Stand-in of the standard library's enum, which Megatron saves."""

    TERM = 15


class Machine:
    """Object of megatron-core with a state."""

    def __init__(self) -> None:
        self.mode = "disabled"


AttnBackend.__module__ = Machine.__module__ = "megatron.test_objects"
Signals.__module__ = "signal"


@pytest.fixture(autouse=True)
def importable_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pickle find the stand-ins under the names that files of Megatron have."""
    import sys
    import types

    for name in ("megatron", "megatron.test_objects"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    enums = sys.modules["megatron.test_objects"]
    monkeypatch.setattr(enums, "AttnBackend", AttnBackend, raising=False)
    monkeypatch.setattr(enums, "Machine", Machine, raising=False)
    monkeypatch.setattr("signal.Signals", Signals)


class Evil:
    """Object that runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_objects_of_other_programs_become_records(tmp_path: Path) -> None:
    """Enum members, objects of Megatron and states of generators are read as records."""
    path = one_rank(tmp_path)

    def add(content: dict[str, Any]) -> None:
        content["args"].exit_signal = Signals.TERM
        content["args"].attention_backend = AttnBackend.auto
        content["rng_state"] = [{"np_rng_state": ("MT19937", os_array(), 3, 0, 0.0)}]
        content["rerun_state_machine"] = Machine()

    edit(path, add)
    assert_same(MegatronState(tmp_path), MemoryState(GPT))
    args = values_of(load_content(path)["args"])
    assert args is not None
    # By number or by name: versions of Python pickle members of an enumeration in either way.
    backend = str(args["attention_backend"])
    assert backend in {f"megatron.test_objects.AttnBackend({one})" for one in ("5", "auto")}


def test_code_is_refused_and_named(tmp_path: Path) -> None:
    """A file that would run code is refused with the name of the function."""
    path = one_rank(tmp_path)
    edit(path, lambda content: content.update(rng_state=Evil()))
    with pytest.raises(CheckpointError, match="is refused") as caught:
        MegatronState(tmp_path)
    assert "system" in (caught.value.why or "")
    assert not Path("evil").exists()
