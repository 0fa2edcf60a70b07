"""`Guard`: who may use the server, and how large and slow a request may be."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcore.base.errors import counted
from lmcore_serve.errors import ApiError
from lmcore_serve.http.problems import reply

__all__ = ["OPEN_PATHS", "Guard"]

OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""
_OPEN_FOLDER = "/page/"
_MAX_BODIES = 16
"""Memory for the bodies of all requests, in largest bodies of one."""


class Guard:
    """ASGI middleware with the checks before a request."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        hosts: Collection[str] | None,
        *,
        max_body_bytes: int,
        body_seconds: float,
    ) -> None:
        """Wrap an application.

        Args:
            app: Application.
            keys: API keys; without any, everybody may use the server.
            hosts: Names that a request may call this server by; None: any.
            max_body_bytes: Size of a body.
            body_seconds: Time that a client has to send the body.
        """
        self._app, self._hosts = app, hosts
        self._max_bytes, self._seconds = max_body_bytes, body_seconds
        self._keys = [_digest(key) for key in keys]
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = _framing_problem(scope)
        if problem is not None:
            answer = reply(scope["path"], problem)
            answer.headers["Connection"] = "close"  # where the next request begins is not known
            await answer(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem is not None:
            await reply(scope["path"], problem)(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            problem = await self._receive(scope, receive, parts)
            if problem is not None:
                await reply(scope["path"], problem)(scope, receive, send)
            elif parts:
                await self._app(scope, _replayed(parts[0], receive), send)
        finally:
            self._held -= sum(map(len, parts))

    async def _receive(self, scope: Scope, receive: Receive, parts: list[bytes]) -> ApiError | None:
        """Receive a body as the one element of a list; of none if the client has left.

        Returns:
            Why it is refused; None: it is not.
        """
        announced = Headers(scope=scope).get("content-length", "")
        too_large = ApiError(413, f"the body has more than {self._max_bytes} bytes")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            return too_large
        size, more = 0, True
        try:
            async with asyncio.timeout(self._seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        self._held -= size
                        parts.clear()
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    if size > self._max_bytes:
                        return too_large
                    if self._held > _MAX_BODIES * self._max_bytes:
                        return ApiError(
                            503,
                            "the server has too many bodies of requests",
                            code="busy",
                            retry_after=1,
                        )
                    more = message.get("more_body", False)
        except TimeoutError:
            limit = counted(self._seconds, "second")
            return ApiError(408, f"the body did not arrive within {limit}")
        parts[:] = [b"".join(parts)]
        return None

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            # A page of another site, whose name was made to lead here, sends its own.
            return ApiError(
                403,
                "the header `Host` does not name this server; `--allowed-host` allows others",
            )
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        found = _digest(key.strip())
        # All are compared, in the same time whatever they are.
        matches = [hmac.compare_digest(found, one) for one in self._keys]
        if kind.lower() == "bearer" and any(matches):
            return None
        what = "is not known" if key else "is missing: send the header `Authorization: Bearer KEY`"
        return ApiError(401, f"the API key {what}", code="invalid_api_key")


def _framing_problem(scope: Scope) -> ApiError | None:
    """Return why the end of a request is not certain, which a proxy may see elsewhere."""
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        return ApiError(400, "`Content-Length` and `Transfer-Encoding` exclude each other")
    return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives the body once, then further messages."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _host(header: str) -> str:
    """Return the name in a `Host` header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
