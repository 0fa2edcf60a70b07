"""A torch package of a vendor, for tests: registers the device `hostchip`.

Random numbers are the host's, and indices are integers; what the module lacks, such as memory
statistics, is `torch.accelerator`'s.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("hostchip.so"))
torch.utils.rename_privateuse1_backend("hostchip")


def is_available() -> bool:
    """Return True: the device is the host."""
    return True


def device_count() -> int:
    """Return the number of devices."""
    return 1


@contextlib.contextmanager
def device(_: object) -> Iterator[None]:
    """Make the device the current one, which it always is; torch passes its own kind of device."""
    yield


def manual_seed(seed: int) -> None:
    """Seed the generator."""
    torch.default_generator.manual_seed(seed)


def get_rng_state(index: int) -> torch.Tensor:
    """Return the generator's state."""
    _require_integer(index)
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, index: int) -> None:
    """Restore the generator's state."""
    _require_integer(index)
    torch.default_generator.set_state(state)


def _require_integer(index: object) -> None:
    if not isinstance(index, int):
        raise TypeError(f"{index!r} is no integer")


def manual_seed_all(seed: int) -> None:
    """Seed nothing: `torch.manual_seed` calls this after it has seeded the host's generator."""


def _is_in_bad_fork() -> bool:
    return False


torch._register_device_module("hostchip", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
