"""`GET /v1/models`: the models of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from lmcore_serve.state import ServerState

if TYPE_CHECKING:
    from lmcore_serve.served_model import ServedModel

__all__ = ["router"]

router = APIRouter()


class ModelReply(BaseModel):
    """A model.

    Attributes:
        facts: Facts of it: parameters, positions, step, precision.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    facts: dict[str, Any]


class ModelsReply(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelReply]


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> ModelsReply:
    """List the models, the one of requests without a name first."""
    state: ServerState = request.app.state.server
    return ModelsReply(object="list", data=[_described(one) for one in state.models.values()])


@router.get("/v1/models/{name:path}", summary="Describe a model")
async def describe_model(name: str, request: Request) -> ModelReply:
    """Describe a model."""
    state: ServerState = request.app.state.server
    return _described(state.model(name))


def _described(model: ServedModel) -> ModelReply:
    return ModelReply(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="lmcore",
        facts=dict(model.facts),
    )
