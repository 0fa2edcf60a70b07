"""Loading of a model for lm-eval-harness, which knows neither devices nor precisions of lmcore."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.plugin import discover
from lmcore.runtime.device_choice import prepare_environment, select_device
from lmcore.runtime.launch.rank import only_process

if TYPE_CHECKING:
    from lmcore.inference.load import LoadedModel

__all__ = ["opened_model"]


@contextmanager
def opened_model(
    path: str,
    *,
    device: str | None,
    precision: str | None,
    quantization: str | None,
    rows: int,
) -> Iterator[LoadedModel]:
    """Load a model in this process, and enter a context in which its device is in use.

    Args:
        path: Directory of a run, or of a checkpoint in any format.
        device: As `lmcore evaluate --device`; None: detected.
        precision: Precision policy; None: the first that the device offers.
        quantization: Integers that the weights are rounded to; None: none.
        rows: Usual number of sequences of a pass.

    Raises:
        CheckpointError, ConfigError, DataError, DeviceError: See `load_model`.
    """
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.data.tokenizer.build import registered_types
    from lmcore.generation.options import precision_of
    from lmcore.inference.load import load_model
    from lmcore.runtime.runtime import start_runtime

    plugins, rank = discover(), only_process(os.environ)
    selection = select_device(plugins, device, rank)
    prepare_environment(plugins, selection, rank)
    accelerator = AcceleratorSection(device=device, precision=precision_of(precision, quantization))
    config = Config(accelerator=accelerator)
    with start_runtime(config, plugins, selection, rank, None) as runtime:
        extra = registered_types(plugins)
        yield load_model(Path(path), runtime, extra=extra, rows=rows, quantization=quantization)
