"""`ServerState`: the models and limits that the endpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore_serve.errors import ApiError

if TYPE_CHECKING:
    from lmcore_serve.served_model import ServedModel

__all__ = ["MAX_ITEMS", "MAX_PROMPTS", "Limits", "ServerState"]

MAX_PROMPTS = 128
"""Most prompts of a request."""
MAX_ITEMS = 1_000_000
"""Most token ids of a request."""


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        max_body_bytes: Size of a request's body.
        body_seconds: Time that a client has to send the body.
        check_seconds: Time in which the body has to be checked.
        head_seconds: Time that a client has to send the head of a request, after the begin of the
            connection or the reply before.
        unread_seconds: Time without progress in which a client has to read a reply.
        max_connections: Number of open connections.
        request_seconds: Time in which all texts of a request have to be complete.
        max_total_tokens: Number of prompts times the longest text of one request of Megatron's
            interface, in tokens.
    """

    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    check_seconds: float = 10.0
    head_seconds: float = 10.0
    unread_seconds: float = 30.0
    max_connections: int = 512
    request_seconds: float = 600.0
    max_total_tokens: int = 12000


@dataclass(frozen=True)
class ServerState:
    """Models and limits of a server.

    Attributes:
        models: Models by name; the first one answers requests that name none.
        limits: Limits of requests.
    """

    models: Mapping[str, ServedModel]
    limits: Limits

    @property
    def first(self) -> ServedModel:
        """The model of requests that name none."""
        return next(iter(self.models.values()))

    @property
    def max_items(self) -> int:
        """Number of token ids that a body may have: as many as the largest model has places for."""
        positions = max(one.positions for one in self.models.values())
        return min(MAX_PROMPTS * positions, MAX_ITEMS)

    def model(self, name: str | None) -> ServedModel:
        """Return a model by its name in a request.

        Raises:
            ApiError: There is no such model.
        """
        if name is None:
            return self.first
        if (found := self.models.get(name)) is not None:
            return found
        names = ", ".join(f"`{one}`" for one in self.models)
        raise ApiError(
            404,
            f"there is no model `{name[:100]}`; this server has {names}",
            field="model",
            code="model_not_found",
        )
