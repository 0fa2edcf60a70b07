"""Streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from lmcore_serve.errors import ApiError
from lmcore_serve.http.problems import openai_problem

__all__ = ["event_stream", "stream_schema"]


def event_stream(chunks: AsyncIterator[Mapping[str, Any]]) -> StreamingResponse:
    """Return a response that sends each chunk as an event, and `[DONE]` at the end.

    An error after the start is an event, too: the status has been sent.
    """

    async def events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except ApiError as error:
            yield _event(openai_problem(error))
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def stream_schema(chunk: type[BaseModel]) -> dict[str, Any]:
    """Return the content of a reply in OpenAPI's form, given the class of its chunks."""
    names = (chunk.__name__, "Problem")
    data = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [{"$ref": f"#/components/schemas/{one}"} for one in names]},
    }
    event = {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {"text/event-stream": {"itemSchema": event}}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
