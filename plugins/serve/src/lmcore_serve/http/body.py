"""`BodyReader`: the JSON body of a request, bounded before it is parsed, checked by its class.

Parsing and validation hold Python's lock, so their time is a pause of the whole server.  It is
limited by what they are given: the strings, lists and objects are counted in the bytes before any
is made, and of a list only the first error is reported.  Large bodies are parsed one at a time, in
a thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from lmcore.base.errors import counted
from lmcore_serve.errors import ApiError

__all__ = [
    "MAX_DEPTH",
    "MAX_KEYS",
    "MAX_PARTS",
    "BodyReader",
    "RequestBody",
    "body_of",
    "schema_of",
]

MAX_PARTS = 50_000
"""Strings, lists and objects of a body, names of fields included."""
MAX_DEPTH = 100
"""Lists and objects within each other."""
MAX_KEYS = 1000
"""Fields of an object."""
_SMALL = 16 * 1024
"""Size of bodies that are parsed at once, which takes less than a millisecond."""
_MOST_SHOWN = 10

_STRUCTURE = b'"[]{},'
_OTHER = bytes(one for one in range(256) if one not in _STRUCTURE)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_KINDS = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
"""Kinds of JSON values that are no object, by their type; others are numbers."""


class RequestBody(BaseModel):
    """Body of a request.

    Attributes:
        absent: Messages for fields that clients may send and that there are not.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    absent: ClassVar[Mapping[str, str]] = {}


Body = TypeVar("Body", bound=RequestBody)


class BodyReader:
    """Parser of all bodies of a server."""

    def __init__(self, max_items: int, seconds: float) -> None:
        """Set the limits.

        Args:
            max_items: Commas of a body; in long bodies these separate the token ids of prompts.
            seconds: Time until a body is checked, including the bodies before it.
        """
        self._max_items, self._seconds = max_items, seconds
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lmcore-bodies")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Return the body of a request.

        Args:
            request: Request.
            kind: Class of the body.

        Raises:
            ApiError: It is no such body, beyond a limit, or the server has too many to parse.
        """
        raw = await request.body()
        if not raw:
            raise ApiError(400, "the body must be a JSON object; it is empty")
        if not _is_json(request.headers.get("content-type", "")):
            raise ApiError(400, "send the body with the header `Content-Type: application/json`")
        if len(raw) <= _SMALL:
            return self._checked(raw, kind)
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._checked, raw, kind)
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except TimeoutError:
            raise ApiError(
                503,
                f"the body could not be checked within {counted(self._seconds, 'second')}",
                code="busy",
                retry_after=1,
            ) from None

    def _checked(self, raw: bytes, kind: type[Body]) -> Body:
        """Return a body, if it is one of its class."""
        self._require_bounded(raw)
        value = _parsed(raw)
        if not isinstance(value, dict):
            found = _KINDS.get(type(value), "a number")
            raise ApiError(400, f"the body must be a JSON object; got {found}")
        if _SURROGATE.search(raw) and (place := next(_surrogates(value), None)) is not None:
            raise ApiError(
                400,
                f"`{_name(place)}` has an unpaired surrogate (invalid Unicode)",
                field=_name(place[:1]),
            )
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            raise _of_fields(problems, value, kind.absent) from None

    def _require_bounded(self, raw: bytes) -> None:
        """Raise an error for a body of too many parts, by its characters alone."""
        # Without escaped ones, each quotation mark is the begin or the end of a string.
        plain = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER)
        parts, outside = plain.count(b'"') // 2, b""
        if parts <= MAX_PARTS:
            outside = b"".join(plain.split(b'"')[::2])
            parts += outside.count(b"[") + outside.count(b"{")
        if parts > MAX_PARTS:
            raise ApiError(
                400, f"the body has more than {MAX_PARTS} strings, lists and objects; send less"
            )
        if outside.count(b",") > self._max_items + MAX_PARTS:
            raise ApiError(
                400, f"the body has more than {self._max_items + MAX_PARTS} values; send less"
            )
        depth = 0
        for one in outside.translate(None, b","):
            depth += 1 if one in b"[{" else -1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"the body is nested too deeply: over {MAX_DEPTH} levels")
            if depth < 0:
                raise ApiError(400, "the body is not JSON")


def body_of(kind: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """Return the dependency of an endpoint that takes a body of a class."""

    async def read(request: Request) -> Body:
        reader: BodyReader = request.app.state.bodies
        return await reader.read(request, kind)

    return read


def schema_of(kind: type[RequestBody]) -> dict[str, Any]:
    """Return what an endpoint's entry in the OpenAPI schema says of its body."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _is_json(content_type: str) -> bool:
    kind, _, name = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (name == "json" or name.endswith("+json"))


def _parsed(raw: bytes) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except json.JSONDecodeError:
        raise ApiError(400, "the body is not JSON") from None
    except ValueError:
        raise ApiError(400, "the body has a number of too many digits") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a body, whose fields have to differ."""
    if len(pairs) > MAX_KEYS:
        raise ApiError(
            400, f"the body has an object of {len(pairs)} fields; at most {MAX_KEYS} are taken"
        )
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"`{_name([twice])}` is given more than once")
    return made


def _surrogates(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the places of texts, and of names, that cannot be encoded."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
            yield place
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _surrogates(one, (*place, str(number)))
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _surrogates(name, (*place, name))
            yield from _surrogates(one, (*place, name))


def _name(place: Sequence[str]) -> str:
    """Return the name of a place of the body in messages."""
    return ".".join(place)[:100].encode(errors="backslashreplace").decode()


def _of_fields(
    problems: Sequence[Mapping[str, Any]], body: Mapping[str, Any], absent: Mapping[str, str]
) -> ApiError:
    """Return one error for all fields that are wrong: of each the first problem."""
    found: dict[str, str] = {}
    for one in problems:
        place = _place(one, body)
        found.setdefault(_name(place[:1]), _message(one, place, absent))
    shown = list(found.values())
    more = [f"and {len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return ApiError(400, "; ".join(shown[:_MOST_SHOWN] + more), field=next(iter(found)))


def _place(problem: Mapping[str, Any], body: Mapping[str, Any]) -> list[str]:
    """Return the place of a problem, without the names of types that a field may have."""
    value: Any = body
    place = []
    for number, part in enumerate(problem["loc"], start=1):
        found = isinstance(value, dict) and part in value
        if found or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
        elif problem["type"] != "missing" or number < len(problem["loc"]):
            continue
        place.append(str(part))
    return place


def _message(problem: Mapping[str, Any], place: Sequence[str], absent: Mapping[str, str]) -> str:
    """Return what is wrong with a place of the body."""
    kind, where = problem["type"], _name(place)
    only_empty = kind == "too_long" and problem["ctx"]["max_length"] == 0
    if kind == "none_required" or only_empty:
        return f"`{where}` is not supported"
    if kind == "extra_forbidden":
        return absent.get(where, f"`{where}` is not a field of this request")
    if kind in {"dict_type", "model_type"}:
        return f"`{where}` has to be an object"
    if kind == "wrong_kind":
        return f"`{where}` {problem['msg']}"
    said = str(problem["ctx"]["error"]) if kind == "value_error" else problem["msg"]
    return f"`{where}`: {said[:1].lower()}{said[1:]}"
