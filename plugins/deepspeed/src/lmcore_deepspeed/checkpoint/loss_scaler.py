"""Loss scale of float16: `loss_scaler`, a pickled object of DeepSpeed's class.

From a universal checkpoint DeepSpeed replaces the object of its run by the one in
`optimizer_state.pt`, so that the window, the hysteresis and the smallest scale also come from the
file, and not from its configuration.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from lmcore.conversion.foreign_pickle.records import values_of
from lmcore.conversion.megatron.optimizer.loss_scale import scale_state
from lmcore.conversion.torch_file import save_file

if TYPE_CHECKING:
    from lmcore.conversion.state import Progress

__all__ = ["deepspeed_loss_scale", "loss_scaler", "loss_scaler_note", "save_with_scaler"]

_GLOBAL = pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n"
_DEFAULTS = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0}
"""Settings of the loss scale if the checkpoint has none: defaults of lmcore and DeepSpeed."""


class DynamicLossScaler:
    """Object that is pickled under the name of DeepSpeed's class, which is not imported.

    It has the attributes of that class.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Set all attributes."""
        self.__dict__.update(values)


class _Pickler(pickle.Pickler):
    """Pickler that writes the name of DeepSpeed's class for the one above."""

    def __init__(self, stream: BinaryIO, protocol: int) -> None:
        self._stream, self._written = stream, io.BytesIO()
        super().__init__(self._written, protocol)

    def dump(self, obj: Any) -> None:
        """Write an object; see `pickle`."""
        super().dump(obj)
        # Until protocol 3 a class is named by a text of two lines.
        ours = f"{__name__}\n{DynamicLossScaler.__qualname__}\n".encode()
        self._stream.write(self._written.getvalue().replace(pickle.GLOBAL + ours, _GLOBAL))


class _PickleModule:
    """Stand-in of the module `pickle` for `torch.save`."""

    Pickler = _Pickler


def deepspeed_loss_scale(scaler: object) -> dict[str, float] | None:
    """Return the loss scale in DeepSpeed's `loss_scaler`; None if it is not dynamic, or not known.

    Args:
        scaler: Record of a `DynamicLossScaler`.
    """
    values = values_of(scaler) or {}
    names = ("cur_iter", "last_overflow_iter", "scale_window")
    iteration, overflow, window = (values.get(name) for name in names)
    if type(iteration) is not int or type(overflow) is not int or type(window) is not int:
        return None
    # The first step after an overflow is not counted.
    good = max(iteration - overflow - 2, 0) % max(window, 1)
    return scale_state(values.get("cur_scale"), good, values.get("cur_hysteresis"))


def loss_scaler(
    progress: Progress | None, settings: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the part of `optimizer_state.pt` that has the loss scale; empty without one.

    Args:
        progress: Position of the run.
        settings: Settings of the run; only the ones of the loss scale are used.
        dtype: Dtype of the model's weights.
    """
    if progress is None or progress.loss_scale is None or dtype != torch.float16:
        return {}
    scale, known = progress.loss_scale, _settings(settings)
    good_steps = int(scale["good_steps"])
    values = {
        "cur_scale": float(scale["value"]),
        "dynamic": True,
        "cur_iter": progress.iteration,
        # The first step after an overflow is not counted.
        "last_overflow_iter": progress.iteration - 2 - good_steps,
        "scale_factor": 2.0,
        "scale_window": int(known["loss_scale_window"]),
        "min_scale": float(known["min_loss_scale"]),
        "delayed_shift": int(known["hysteresis"]),
        # At 1 the next overflow halves the scale; DeepSpeed counts no further.
        "cur_hysteresis": max(int(scale["tolerance"]), 1),
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": torch.float16,
    }
    return {"loss_scaler": DynamicLossScaler(values), "dynamic_loss_scale": True, "overflow": False}


def loss_scaler_note(
    progress: Progress | None, settings: Mapping[str, Any], dtype: torch.dtype
) -> list[str]:
    """Return a note of the settings that come with a loss scale; see `loss_scaler`.

    Args:
        progress: Position of the run.
        settings: Settings of the run.
        dtype: Dtype of the model's weights.
    """
    if not loss_scaler(progress, settings, dtype):
        return []
    known = _settings(settings)
    note = (
        f"DeepSpeed takes the settings of the loss scale from the universal checkpoint: "
        f"`loss_scale_window` {known['loss_scale_window']}, `hysteresis` {known['hysteresis']} and "
        f"`min_loss_scale` {known['min_loss_scale']:g}, in the place of the `fp16` in its "
        "configuration"
    )
    return [note]


def save_with_scaler(content: Mapping[str, Any], path: Path) -> None:
    """Write a file that may contain the object of `loss_scaler`.

    Args:
        content: Content of the file.
        path: Path of the file.
    """
    save_file(dict(content), path, pickle_module=_PickleModule, pickle_protocol=2)


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings.get(name, default) for name, default in _DEFAULTS.items()}
