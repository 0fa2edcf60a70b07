"""`RngTracker`: named streams of one device's random numbers, and states that can be restored.

Dropout must draw the same numbers when a block is computed again, and other ones, or deliberately
the same, on devices that share a layer.  Both are done by exchanging the state of the device's one
generator, through `Device.get_rng_state` and `set_rng_state` alone, so that it works on any device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lmcore.base.errors import DeviceError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["RngSnapshot", "RngTracker"]

logger = logging.getLogger(__name__)

_HOST_NUMBERS = (
    "device `{}` draws its random numbers from the host's generator, whose state its "
    "`get_rng_state` does not return: streams of random numbers are not separate, so that ranks of "
    "a tensor-parallel group may drop the same elements. The plugin's authors can pass "
    "`seed=torch.default_generator.manual_seed`, `get_rng_state=torch.get_rng_state` and "
    "`set_rng_state=torch.set_rng_state` to `Device.from_torch`"
)


@dataclass(frozen=True)
class RngSnapshot:
    """All that a tracker exchanges, at one moment.

    Attributes:
        current: The stream that was being drawn from; None: the device's own.
        states: State of each stream and, under None, of the device's own.
        host: State of the host's generator, where that is another one.
    """

    current: str | None
    states: Mapping[str | None, Tensor]
    host: Tensor | None


class _Device(Protocol):
    """The part of a `Device` that concerns random numbers."""

    @property
    def type(self) -> str: ...
    @property
    def torch_device(self) -> torch.device: ...
    def seed(self, number: int, /) -> None: ...
    def get_rng_state(self) -> Tensor: ...
    def set_rng_state(self, state: Tensor, /) -> None: ...


class RngTracker:
    """The streams of a device.

    A device may bring another tracker (`Device.new_rng_tracker`), for example with a
    generator for each stream; it then implements `snapshot` and `restore` too.
    """

    def __init__(self, device: _Device) -> None:
        """Create a tracker without streams."""
        self.device = device
        self._current: str | None = None
        self._states: dict[str | None, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The streams, in the order in which they were added."""
        return tuple(name for name in self._states if name is not None)

    def add(self, name: str, seed: int) -> None:
        """Add a stream that begins where *seed* puts the device's generator.

        Raises:
            ValueError: There is one of that name.
        """
        if not name or name in self._states:
            raise ValueError(f"a stream cannot be called `{name}`: " + self._listed())
        with self.preserved():
            self.device.seed(seed)
            state = self._live()
        self._states[name] = state

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draw from a stream within the context, and from where it stopped the next time.

        Streams may be entered within each other, also the same one again.

        Raises:
            ValueError: There is no stream of that name.
        """
        if name not in self._states:
            raise ValueError(
                f"there is no stream `{name}`: " + self._listed() + "; `add` makes one"
            )
        outer = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def states(self) -> dict[str, Tensor]:
        """Return a copy of each stream's state, for a checkpoint."""
        if self._current is not None:
            self._states[self._current] = self._live()
        return {name: self._states[name].clone() for name in self.names}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Put the streams to *states*; they are the only ones afterwards.

        Raises:
            RuntimeError: A stream is being drawn from.
        """
        if self._current is not None:
            raise RuntimeError(f"stream `{self._current}` is being drawn from")
        self._states = {name: state.clone() for name, state in states.items()}

    def snapshot(self) -> RngSnapshot:
        """Return the state of everything that a block may draw from."""
        import torch

        states = {**self._states, self._current: self._live()}
        host = torch.get_rng_state() if self._has_host else None
        return RngSnapshot(self._current, states, host)

    def restore(self, snapshot: RngSnapshot) -> None:
        """Put back what `snapshot` returned."""
        import torch

        self._current = snapshot.current
        self._states = dict(snapshot.states)
        self.device.set_rng_state(self._states[self._current])
        if self._current is None:
            del self._states[None]
        if snapshot.host is not None:
            torch.set_rng_state(snapshot.host)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Leave the random numbers as they were before the context."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.restore(before)

    @contextlib.contextmanager
    def restored(self, snapshot: RngSnapshot) -> Iterator[None]:
        """Repeat within the context the draws made after *snapshot*; outside nothing changes."""
        with self.preserved():
            self.restore(snapshot)
            yield

    def verify(self) -> None:
        """Test on the device that a restored state repeats the numbers.

        A warning is logged if they repeat only with the host's state, which `snapshot` has too:
        recomputation and continued runs are exact then, but streams are not separate.

        Raises:
            DeviceError: They do not repeat; dropout could not be recomputed, nor a run continued.
        """
        import torch

        with self.preserved():
            start = self.snapshot()
            first, later = (torch.rand(8, device=self.device.torch_device) for _ in range(2))
            self.restore(replace(start, host=None))
            own = torch.rand(8, device=self.device.torch_device)
            self.restore(start)
            again = torch.rand(8, device=self.device.torch_device)
        if torch.equal(first, again) and not torch.equal(first, later):
            if not torch.equal(first, own):
                logger.warning("%s", _HOST_NUMBERS.format(self.device.type))
            return
        same = torch.equal(first, later)
        raise DeviceError(
            f"device `{self.device.type}` does not restore its random numbers",
            why="two draws in a row were equal" if same else "a restored state gave other numbers",
            hint="update the plugin that brings this device, or report this to its authors",
        )

    @property
    def _has_host(self) -> bool:
        # The CPU's generator is the host's.
        return self.device.type != "cpu"

    def _live(self) -> Tensor:
        return self.device.get_rng_state().clone()

    def _switch(self, to: str | None) -> None:
        if to == self._current:
            return
        self._states[self._current] = self._live()
        self._current = to
        self.device.set_rng_state(self._states[to])
        if to is None:
            del self._states[None]

    def _listed(self) -> str:
        return "there are " + (", ".join(f"`{name}`" for name in self.names) or "no streams")
