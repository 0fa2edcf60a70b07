"""`Session.log`: numbers and texts of a user's loop at the loggers of `lmcore.start`."""

from __future__ import annotations

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

import lmcore
from lmcore.base.errors import ConfigError


def scalars(folder):
    """Return the scalars of the event files by step and name."""
    found = {}
    for path in folder.iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found |= {(event.step, one.tag): one.simple_value for one in event.summary.value}
            at += 16 + size
    return found


def test_numbers_and_tensors(tmp_path):
    """Numbers and tensors of one element are logged at their step; none that is not finite."""
    with lmcore.start(device="cpu", tensorboard_dir=str(tmp_path / "tb")) as rt:
        rt.log({"loss": torch.tensor([0.5]), "lr": 0.25, "odd": float("nan")}, step=7)
        rt.log({"loss": 0.125})
    assert scalars(tmp_path / "tb") == {(7, "loss"): 0.5, (7, "lr"): 0.25, (0, "loss"): 0.125}


@pytest.mark.parametrize("arguments", [{}, {"wandb_entity": "team"}])
def test_without_a_logger(capsys, tmp_path, monkeypatch, arguments):
    """One warning names the arguments; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with lmcore.start(device="cpu", **arguments) as rt:
        rt.log({"loss": 0.5})
        rt.log({"loss": 0.5})
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "rt.log" in one]
    assert "give `lmcore.start` `tensorboard_dir`" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [{"loss": torch.ones(2)}, {"loss": None}, {"loss": [1]}])
def test_wrong_values(values, tmp_path):
    """A value that is no number is named."""
    with (
        lmcore.start(device="cpu", tensorboard_dir=str(tmp_path)) as rt,
        pytest.raises(ConfigError, match="`loss` is"),
    ):
        rt.log(values)


@pytest.mark.parametrize("values", ["loss", 0.5, [("loss", 0.5)], None])
def test_values_without_names(values):
    """Anything but numbers and texts by name is refused."""
    with lmcore.start(device="cpu") as rt, pytest.raises(ConfigError, match="`log` of"):
        rt.log(values)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_wrong_steps(step):
    """A step is an integer of 0 or more."""
    with lmcore.start(device="cpu") as rt, pytest.raises(ConfigError, match="integer of 0"):
        rt.log({"loss": 1}, step=step)


def test_options_of_training_are_refused():
    """Settings of loggers that need the steps of `lmcore train` are no arguments."""
    with pytest.raises(ConfigError, match="unknown argument"):
        lmcore.start(device="cpu", tensorboard_tags="megatron")
