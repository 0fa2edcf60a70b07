"""`Texts`: all texts of one HTTP request, as they grow, or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import LmcoreError, counted
from lmcore.generation.request import Request, TokenProbability
from lmcore.generation.sampling.json_schema import JsonSchemaError
from lmcore.generation.text.completion import Completion
from lmcore.inference.parallel.driver import ProcessesError
from lmcore_serve.errors import ApiError
from lmcore_serve.service import ClosedError, QueueFullError
from lmcore_serve.work import BeamRequest, EndReason, Update, Work

if TYPE_CHECKING:
    from lmcore.generation.beam import Beam
    from lmcore_serve.served_model import ServedModel

__all__ = ["Text", "TextRequest", "Texts"]

_GRACE_SECONDS = 5.0
"""Time after the deadline in which the service may end the texts itself, after a step."""


@dataclass(frozen=True)
class TextRequest:
    """A text that a client wants.

    Attributes:
        request: Prompt and options.
        completion: Text of the tokens; None for beam search.
    """

    request: Request | BeamRequest
    completion: Completion | None = None


@dataclass
class Text:
    """A whole text; for the attributes see `Update`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenProbability] = field(default_factory=list)
    prompt_logprobs: list[TokenProbability] = field(default_factory=list)
    end: EndReason | None = None
    stopped_by: str | None = None
    stop_token: int | None = None
    stop_logprob: TokenProbability | None = None
    beams: tuple[Beam, ...] = ()

    def add(self, update: Update) -> None:
        """Add what is new."""
        self.text += update.text
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.end, self.stopped_by, self.beams = update.end, update.stopped_by, update.beams
        self.stop_token, self.stop_logprob = update.stop_token, update.stop_logprob


class Texts:
    """All texts of one HTTP request, which share its deadline."""

    def __init__(
        self, model: ServedModel, wanted: Sequence[TextRequest], timeout: float, *, streams: bool
    ) -> None:
        """Queue the texts; called in an event loop.

        Args:
            model: Model that generates them.
            wanted: The texts.
            timeout: Time in seconds until all have to be complete.
            streams: True if `updates` is used and is to have each token.

        Raises:
            ApiError: The queue is full, or the server stops.
        """
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._service, self._timeout = model.service, timeout
        self._deadline = time.monotonic() + timeout
        self._works = [
            Work(one.request, self._taker(number), one.completion, streams, self._deadline)
            for number, one in enumerate(wanted)
        ]
        self._open = len(self._works)
        model.require_texts(self._open)
        try:
            self._service.submit(self._works)
        except QueueFullError:
            raise ApiError(
                429, "the queue of the server is full", code="queue_full", retry_after=1
            ) from None
        except ClosedError:
            raise ApiError(503, "the server is stopping", code="stopping") from None

    def cancel(self) -> None:
        """End the texts that are not complete."""
        if self._open:
            self._service.cancel(self._works)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Return each update with the number of its text.

        Raises:
            ApiError: A text could not be completed.
        """
        try:
            while self._open:
                number, update = await self._next()
                self._open -= update.end is not None
                self._require_good(update)
                yield number, update
        finally:
            self.cancel()

    async def _next(self) -> tuple[int, Update]:
        """Return the next update; a step that hangs keeps no client beyond the deadline."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        left = self._deadline + _GRACE_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._queue.get()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> ApiError:
        limit = counted(self._timeout, "second")
        return ApiError(503, f"the text was not complete after {limit}", code="timeout")

    async def whole(self, receive: Callable[[], Awaitable[Any]]) -> list[Text] | None:
        """Return all texts when they are complete; None if the client has left before.

        Args:
            receive: ASGI function that returns a message when the client leaves.

        Raises:
            ApiError: A text could not be completed.
        """
        made = [Text() for _ in self._works]

        async def collect() -> None:
            async for number, update in self.updates():
                made[number].add(update)

        collecting = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                collecting.result()
                return made
            return None
        finally:
            for task in (collecting, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, ApiError):
                    await task

    def _taker(self, number: int) -> Callable[[Update], None]:
        def take(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, update))

        return take

    def _require_good(self, update: Update) -> None:
        if update.end == "timeout":
            raise self._late()
        if update.end == "cancelled":
            raise ApiError(503, "the server is stopping", code="stopping")
        if update.end == "error":
            match update.error:
                case JsonSchemaError() as error:  # that the client has sent
                    raise ApiError(
                        400, f"`response_format`: {error.what_and_why}", field="response_format"
                    )
                case ProcessesError():  # its reason is the text of a library
                    what = "the processes of the model ended"
                case LmcoreError() as error:
                    what = error.what_and_why
                case _:
                    what = "an internal error"
            raise ApiError(500, f"the text could not be generated: {what}", code="failed")


async def _until_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
