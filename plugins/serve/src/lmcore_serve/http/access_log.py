"""Access log: a JSON object for each request, without the texts.

Requests that reached a model are all logged; of others, which cost a client nothing, some.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcore_serve.http.log_limit import Allowance
from lmcore_serve.http.metrics import Metrics

__all__ = ["AccessLog", "note"]

_NOTES = "lmcore.notes"
_AT_ONCE, _PER_SECOND = 200, 2
"""Lines of requests that reached no model."""


def note(scope: Scope, **values: Any) -> None:
    """Add values to a request's entry in the access log."""
    scope.setdefault(_NOTES, {}).update(values)


class AccessLog:
    """ASGI middleware that logs each request at its end, and counts it."""

    def __init__(
        self,
        app: ASGIApp,
        write: Callable[[str], None] | None,
        metrics: Metrics,
        paths: Collection[str],
    ) -> None:
        """Wrap an application.

        Args:
            app: Application.
            write: Function that takes a line; None: no log.
            metrics: Metrics that count the request.
            paths: Paths of endpoints, for requests that are refused before they reach one.
        """
        self._paths = frozenset(paths)
        self._app, self._write, self._metrics = app, write, metrics
        self._allowance = Allowance(_AT_ONCE, _PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        first: float | None = None
        status, sent = 499, 0
        name = secrets.token_hex(8)
        notes: dict[str, Any] = scope.setdefault(_NOTES, {})

        async def counted(message: Message) -> None:
            nonlocal status, sent, first
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", name.encode()))
            elif message["type"] == "http.response.body" and message.get("body"):
                first = first or time.monotonic()
                sent += len(message["body"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            now = time.monotonic()
            known = scope["path"] if scope["path"] in self._paths else "other"
            route = getattr(scope.get("route"), "path", None) or known
            self._metrics.count(route, scope["method"], status, now - begin)
            omitted = 0 if notes else self._allowance.take()
            if self._write is not None and omitted is not None:
                client = scope.get("client")
                entry = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "id": name,
                    "client": client[0] if client else None,
                    "method": scope["method"][:20],
                    "path": scope["path"][:200],
                    "status": status,
                    "seconds": round(now - begin, 4),
                    "first_byte_seconds": None if first is None else round(first - begin, 4),
                    "bytes": sent,
                    **notes,
                    **({"omitted_before": omitted} if omitted else {}),
                }
                self._write(json.dumps(entry))
